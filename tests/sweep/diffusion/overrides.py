"""The arguments that no row of `sizes.py` gives, or gives wrongly, and why some classes are not compared."""

from __future__ import annotations

from typing import Any

from .inputs import FRAMES, SIDE, WORDS
from .sizes import CHANNELS, HEADS, TEXT, WIDTH

# what the blocks of pictures in older classes need: channels in groups, and a caption of their own width
_GROUPS = {"norm_num_groups": 8, "cross_attention_dim": WIDTH}
_PICTURES = {**_GROUPS, "in_channels": 32, "num_layers": 2}
_TWO_STAGES = {**_GROUPS, "block_out_channels": (32, WIDTH), "layers_per_block": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {"in_channels": 3 * CHANNELS, "audio_acoustic_hidden_dim": CHANNELS, "sliding_window": 8},
    "BriaFibo2Transformer2DModel": {
        "injection_layer_ids": (1,), "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2,
        "gist_min_text_len": 4, "gist_max_text_len": 32,
    },
    "Cosmos3OmniTransformer": {
        "latent_channel": CHANNELS, "patch_latent_dim": 4 * CHANNELS, "rope_axes_dim": [4, 2, 2], "dtype": "float32",
    },
    "CosmosTransformer3DModel": {"concat_padding_mask": False, "max_size": (8, 32, 32)},
    "DreamLiteTransformer2DModel": _PICTURES,
    "EasyAnimateTransformer3DModel": {"in_channels": CHANNELS, "out_channels": CHANNELS, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "caption_channels": [TEXT, TEXT], "llama_layers": [0, 1, 0, 1], "max_resolution": (SIDE, SIDE),
    },
    "HunyuanDiT2DModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": SIDE, "cross_attention_dim": TEXT, "num_layers": 4,
        "cross_attention_dim_t5": TEXT, "text_len": WORDS, "text_len_t5": WORDS,
        "use_style_cond_and_image_meta_size": False,
    },
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": True, "has_clean_x_embedder": True},
    "LTX2VideoTransformer3DModel": {"audio_cross_attention_dim": WIDTH},
    "LatteTransformer3DModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": SIDE, "caption_channels": TEXT, "num_layers": 2,
        "cross_attention_dim": WIDTH, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000,
        "video_length": FRAMES, "norm_elementwise_affine": False, "activation_fn": "gelu-approximate",
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 2, "cross_attention_dim": TEXT, "multiple_of": 16},
    "MiniMaxH3Transformer3DModel": {"rope_freq_dim": 2},
    "MiniMaxMusic3Transformer1DModel": {"rotary_dim": 8},
    "OmniGenTransformer2DModel": {
        "pad_token_id": 0, "num_key_value_heads": HEADS, "pos_embed_max_size": SIDE,
        "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
    },
    "PRXTransformer2DModel": {"axes_dim": [8, 8]},
    "PixArtTransformer2DModel": {"sample_size": SIDE, "caption_channels": TEXT},
    "PriorTransformer": {"embedding_dim": TEXT, "num_embeddings": WORDS},
    "SanaWMTransformer3DModel": {"softmax_every_n": 2, "chunk_plucker_post_attn_blocks": 2, "mixed_precision": "fp32"},
    "StableAudioDiTModel": {"cross_attention_dim": TEXT, "cross_attention_input_dim": TEXT},
    "T5FilmDecoder": {"d_ff": 2 * WIDTH, "d_kv": 16, "input_dims": CHANNELS, "targets_length": 64, "dropout_rate": 0.0},
    "Transformer2DModel": _PICTURES,
    "TransformerTemporalModel": {"in_channels": 32, "norm_num_groups": 8, "num_layers": 2},
    "WanAnimate2Transformer3DModel": {"in_dim": 2 * CHANNELS, "out_dim": CHANNELS, "text_len": WORDS},
    "WanAnimateTransformer3DModel": {
        "in_channels": 2 * CHANNELS + 4, "motion_encoder_size": 16, "motion_style_dim": 32, "motion_dim": 4,
        "motion_encoder_dim": 32, "face_encoder_hidden_dim": 32, "inject_face_latents_blocks": 1,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    },
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
}  # fmt: skip

SKIPPED: dict[str, str] = {}
