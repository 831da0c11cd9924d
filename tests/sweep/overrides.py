"""Exceptions from the general rules: a literal row for each model type that needs one.

"" holds options of the config itself, the name of a part holds options of that part, and "needed" holds the arguments
that the config's class cannot be called without. In "needed", a part is named as ("its type", {options}).
"""

from __future__ import annotations

from typing import Any

Row = dict[str, dict[str, Any]]

_LAGS: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 8,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
}
_ROPE_EACH = {
    "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
_CODEC = {"num_filters": 4, "hidden_size": 32, "codebook_dim": 32}
_WAVTOKENIZER = {"num_filters": 4, "codebook_dim": 64}

# four stages for the neck of a dense prediction head
_FOUR = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "out_features": None}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_MROPE_HALF = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_VOCABULARY_MAP = {"<image>": 8, "IMGIMGAAAAZ": 9, "IMGIMGBBBBZ": 10}

# widths of the layers after a backbone whose channels are those of full size
_HGNET = {"encoder_in_channels": [512, 1024, 2048], "decoder_in_channels": [64, 64, 64]}
_SLIDING_LATENT = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 12,
}

OVERRIDES: dict[str, Row] = {
    "dots3_note_text": {"": _SLIDING_LATENT},
    "qwen4_exp_text": {
        "": {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
            "ple_layer_ids": [1],
            "eos_token_id": 2,
            "ngram_vocab_size_base": 50,
            "heads_per_ngram": 2,
            "hc_lowrank": 8,
        }
    },
    "recurrent_gemma": {"": {"num_hidden_layers": 3}},
    "step3p7_text": {"": {"sliding_window": 6}},
    "step3p7": {"text_config": {"sliding_window": 6}},
    "mobilebert": {"": {"intra_bottleneck_size": 64}},
    "xmod": {"": {"default_language": "en_XX"}},
    "t5": {"": {"decoder_start_token_id": 0}},
    "mt5": {"": {"decoder_start_token_id": 0}},
    "umt5": {"": {"decoder_start_token_id": 0}},
    "longt5": {"": {"decoder_start_token_id": 0}},
    "qwen2_5_omni_text": {"": {"rope_parameters": _MROPE}},
    "swin": {"": {"image_size": 64, "window_size": 2}},
    "hgnet_v2": {"": {"hidden_sizes": [256, 512, 1024, 2048]}},
    "rt_detr": {"": {"decoder_in_channels": [64, 64, 64]}},
    "rt_detr_v2": {"": {"decoder_in_channels": [64, 64, 64]}},
    "d_fine": {"": _HGNET},
    "deimv2": {"": _HGNET},
    "pp_doclayout_v2": {"": {**_HGNET, "class_thresholds": [0.5, 0.5, 0.5]}},
    "pp_doclayout_v3": {"": _HGNET},
    "pp_doclayout_v4": {"": _HGNET},
    "pix2struct_vision_model": {"": {"patch_embed_hidden_size": 192}},
    "kosmos_2_5_vision_model": {"": {"patch_embed_hidden_size": 192}},
    "mllama_vision_model": {"": {"vision_output_dim": 128}},
    "paddleocr_vl_text": {"": {"rope_parameters": _MROPE}},
    "donut-swin": {"": {"depths": [2, 2], "num_heads": [2, 4], "embed_dim": 32}},
    "granite_speech": {"": {"window_size": 15, "downsample_rate": 5}},
    "granite_speech_plus": {"": {"window_size": 15, "downsample_rate": 5}},
    "exaone4_5_vision": {"": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "qwen2_5_omni_vision_encoder": {"": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "perceiver": {
        "": {
            "d_latents": 64,
            "num_latents": 8,
            "d_model": 64,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 4,
            "num_cross_attention_heads": 4,
        }
    },
    "aria": {"": {"projector_patch_to_query_dict": {16: 8}}},
    "blip-2": {"": {"image_token_index": 20}},
    "instructblip": {"": {"image_token_index": 20}},
    "instructblipvideo": {"": {"video_token_index": 20}},
    "glmasr_encoder": {"": {"intermediate_size": 256}},
    "hrm_text": {"": {"num_hidden_layers": 2, "num_layers_per_stack": None}},
    "llama4_vision_model": {
        "": {"intermediate_size": 256, "projector_input_dim": 64, "projector_output_dim": 64, "vision_output_dim": 64}
    },
    "hunyuan_vl_text": {
        "": {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]},
        }
    },
    "bamba": {"": {"attn_layer_indices": [1]}},
    "granitemoehybrid": {"": {"layer_types": ["mamba", "attention"]}},
    "layoutlmv3": {"": {"coordinate_size": 12, "shape_size": 8, "input_size": 32, "max_2d_position_embeddings": 256}},
    "lilt": {"": {"hidden_size": 96}},
    "efficientnet": {"": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 80}},
    "align_vision_model": {"": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 80}},
    "depth_anything": {"backbone_config": _FOUR, "": {"reassemble_hidden_size": 64}},
    "prompt_depth_anything": {"backbone_config": _FOUR, "": {"reassemble_hidden_size": 64}},
    "chmv2": {"backbone_config": _FOUR},
    "zoedepth": {"backbone_config": _FOUR},
    "tipsv2_dpt": {"backbone_config": _FOUR},
    "dpt": {"": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 32, 32]}},
    "beit": {"": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}},
    "data2vec-vision": {"": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]}},
    "glm4v_text": {"": {"rope_parameters": _MROPE}},
    "glm_ocr_text": {"": {"rope_parameters": _MROPE}},
    "glm_image_text": {"": {"rope_parameters": _MROPE}},
    "glm4v_moe_text": {"": {"rope_parameters": _MROPE_HALF}},
    "qwen2_vl_text": {"": {"rope_parameters": _MROPE}},
    "qwen2_5_vl_text": {"": {"rope_parameters": _MROPE}},
    "qwen2_5_vl_vision": {"": {"window_size": 32, "fullatt_block_indexes": [1]}},
    "hiera": {"": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2}},
    "levit": {
        "": {"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4], "key_dim": [8, 8, 8]}
    },
    "deepseek_v2": {
        "": {
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
        }
    },
    "chameleon": {"": {"vocabulary_map": _VOCABULARY_MAP}},
    "emu3": {"": {"vocabulary_map": _VOCABULARY_MAP}},
    "gemma4": {"needed": {"vision_config": ("gemma4_vision", {}), "audio_config": ("gemma4_audio", {})}},
    "gemma4_unified": {
        "needed": {"vision_config": ("gemma4_unified_vision", {}), "audio_config": ("gemma4_unified_audio", {})}
    },
    "autoformer": {"": {**_LAGS, "label_length": 4, "moving_average": 3}},
    "informer": {"": _LAGS},
    "time_series_transformer": {"": _LAGS},
    "bit": {"": {"hidden_sizes": [32, 32, 64, 64], "num_groups": 4, "embedding_size": 32}},
    "cohere_compass_text": {
        "": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _ROPE_EACH}
    },
    "cohere_compass": {
        "text_config": {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": _ROPE_EACH},
    },
    "dots1": {
        "": {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
        }
    },
    "dots3_note_audio_encoder": {"": {"adapter_input_size": 64}},
    "dots3_note_vision_encoder": {"": {"adapter_in_dim": 64}},
    "esm": {"": {"vocab_size": 40, "pad_token_id": 1, "mask_token_id": 32}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n_text": {
        "": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96, 96, 96, 96],
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
        }
    },
    "gemma4_text": {
        "": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }
    },
    "glm5_next_text": {"": {"index_kpool": 2}},
    "gradium_phonon_tts": {"flow_head_config": {"condition_dim": 64}},
    "pocket_tts": {"flow_head_config": {"condition_dim": 64}},
    "granite_speech5_encoder": {"": {"context_size": 8}},
    "hunyuan_v1_dense": {"": {"head_dim": 16}},
    "hunyuan_v1_moe": {"": {"head_dim": 16}},
    "ministral": {"": {"head_dim": 16}},
    "nemotron": {"": {"head_dim": 16, "num_key_value_heads": 2}},
    "zamba": {
        "": {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
        }
    },
    "ernie4_5_vl_moe_text": {"": {"rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]}}},
    "moonshine_streaming": {"": {"num_key_value_heads": 4}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "lfm2_moe": {
        "": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1}
    },
    "lw_detr_vit": {"": {"num_windows": 4, "window_block_indices": [0], "out_indices": [0, 1]}},
    "mamba2": {"": {"num_heads": 4, "head_dim": 32, "n_groups": 1}},
    "nemotron_h": {"": {"n_groups": 1}},
    "mimi": {
        "": {"upsample_groups": 64, "num_filters": 4, "vector_quantization_hidden_dimension": 64, "codebook_dim": 64}
    },
    "wavtokenizer": {"": _WAVTOKENIZER},
    "wavtokenizer_encoder": {"": _WAVTOKENIZER},
    "hy_v4_vl_text": {"": {"rope_parameters": {**_MROPE, "mrope_section": [2, 1, 1]}}},
    "dory": {
        "": {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 3}
    },
    "apertus1p5": {
        "": {"image_token_offset": 32, "audio_token_offset": 64},
        "vision_config": {"codebook_size": 32},
        "audio_config": {"codebook_size": 32},
    },
    "mimi_encoder": {"": {"upsample_groups": 64, "num_filters": 4}},
    "mimi_decoder": {"": {"upsample_groups": 64, "num_filters": 4}},
    "pocket_tts_audio_tokenizer": {"": {"upsample_groups": 64, "num_filters": 4}},
    "pocket_tts_audio_tokenizer_decoder": {"": {"upsample_groups": 64, "num_filters": 4}},
    "pocket_tts_audio_tokenizer_encoder": {"": {"upsample_groups": 64, "num_filters": 4}},
    "encodec": {"": _CODEC},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "reformer": {
        "": {
            "is_decoder": True,
            "axial_pos_shape": [8, 8],
            "axial_pos_embds_dim": [32, 32],
            "num_hashes": 1,
            "attn_layers": ["local", "lsh"],
            "num_buckets": 2,
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
            "attention_head_size": 16,
        }
    },
    "swin2sr": {"": {"depths": [2, 2], "num_heads": [2, 2], "embed_dim": 32, "window_size": 4}},
}

# inputs that a type needs in addition to those that are found by rules
INPUTS: dict[str, dict[str, Any]] = {
    "blt": {"use_cache": False},
}
