"""The arguments that no row of `sizes.py` gives, or gives wrongly, and why some classes are not compared."""

from __future__ import annotations

from typing import Any

from . import controls
from .inputs import FRAMES, SIDE, WORDS
from .sizes import CHANNELS, HEAD, HEADS, TEXT, WIDTH

# what the blocks of pictures in older classes need: channels in groups, and a caption of their own width
_GROUPS = {"norm_num_groups": 8, "cross_attention_dim": WIDTH}
_PICTURES = {**_GROUPS, "in_channels": 32, "num_layers": 2}
_STAGES = {**_GROUPS, "block_out_channels": (32, WIDTH), "layers_per_block": 1, "sample_size": SIDE}
_COG = {"sample_height": SIDE, "sample_width": SIDE, "sample_frames": 4 * FRAMES - 3, "max_text_seq_length": WORDS}

CONFIGS: dict[str, dict[str, Any]] = {
    "AceStepTransformer1DModel": {
        "in_channels": 3 * CHANNELS, "audio_acoustic_hidden_dim": CHANNELS, "sliding_window": 8,
    },
    "BriaFibo2Transformer2DModel": {
        "injection_layer_ids": (1,), "min_num_gist_tokens": 4, "max_num_gist_tokens": 8, "gist_step": 2,
        "gist_min_text_len": 4, "gist_max_text_len": 32,
    },
    "CogVideoXTransformer3DModel": _COG,
    "ConsisIDTransformer3DModel": _COG,
    "Cosmos3OmniTransformer": {
        "latent_channel": CHANNELS, "patch_latent_dim": 4 * CHANNELS, "rope_axes_dim": [4, 2, 2], "dtype": "float32",
    },
    "CosmosTransformer3DModel": {"concat_padding_mask": False, "max_size": (8, 32, 32)},
    "DreamLiteTransformer2DModel": _PICTURES,
    "EasyAnimateTransformer3DModel": {"in_channels": CHANNELS, "out_channels": CHANNELS, "patch_size": 2},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2, "caption_channels": [TEXT, TEXT], "llama_layers": [0, 1, 0, 1], "max_resolution": (SIDE, SIDE),
        "axes_dims_rope": (4, 6, 6),
    },
    "HunyuanDiT2DModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": SIDE, "cross_attention_dim": TEXT, "num_layers": 4,
        "cross_attention_dim_t5": TEXT, "text_len": WORDS, "text_len_t5": WORDS,
        "use_style_cond_and_image_meta_size": False,
    },
    "HunyuanVideoFramepackTransformer3DModel": {"has_image_proj": True, "has_clean_x_embedder": True},
    "Ideogram4Transformer2DModel": {"mrope_section": (4, 2, 2)},
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
    "RFD4ProteinaTransformer": {
        "feats_seq": ("xt_bb_ca", "xt_local_latents"), "feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents"),
        "feats_pair_repr": ("xt_bb_ca_pair_dists",), "pair_repr_dim": TEXT, "tri_mult_c": TEXT, "dim_cond": TEXT,
    },
    "SanaWMTransformer3DModel": {"softmax_every_n": 2, "chunk_plucker_post_attn_blocks": 2, "mixed_precision": "fp32"},
    "StableAudioDiTModel": {"cross_attention_dim": TEXT, "cross_attention_input_dim": TEXT},
    "T5FilmDecoder": {"d_ff": 2 * WIDTH, "d_kv": 16, "input_dims": CHANNELS, "targets_length": 64, "dropout_rate": 0.0},
    "Transformer2DModel": _PICTURES,
    "TransformerTemporalModel": {"in_channels": 32, "norm_num_groups": 8, "num_layers": 2},
    "WanAnimate2Transformer3DModel": {
        "in_dim": 2 * CHANNELS, "out_dim": CHANNELS, "text_len": WORDS, "use_img_emb": False,
    },
    "WanAnimateTransformer3DModel": {
        "in_channels": 2 * CHANNELS + 4, "motion_encoder_size": 16, "motion_style_dim": 32, "motion_dim": 4,
        "motion_encoder_dim": 32, "face_encoder_hidden_dim": 32, "inject_face_latents_blocks": 1,
        "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16},
    },
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
}  # fmt: skip
# the same for UNets
UNETS: dict[str, dict[str, Any]] = {
    "DreamLiteUNetModel": {**_STAGES, "block_out_channels": (32, WIDTH, WIDTH), "attention_head_dim": HEAD},
    "I2VGenXLUNet": {
        **_STAGES, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "attention_head_dim": HEAD,
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "num_attention_heads": 2,
    },
    "Kandinsky3UNet": {
        "block_out_channels": (32, WIDTH), "groups": 8, "layers_per_block": 2, "time_embedding_dim": TEXT,
        "cross_attention_dim": WIDTH, "encoder_hid_dim": TEXT,
    },
    "StableCascadeUNet": {
        "block_out_channels": (32, WIDTH), "num_attention_heads": (2, HEADS), "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1), "conditioning_dim": WIDTH, "clip_text_pooled_in_channels": TEXT,
        "clip_text_in_channels": TEXT, "dropout": (0.0, 0.0),
    },
    "UNet1DModel": {"sample_size": 64, "extra_in_channels": 64},
    "UNet2DConditionModel": {
        **_STAGES, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": HEADS,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    },
    "UNet2DModel": {
        "norm_num_groups": 8, "block_out_channels": (32, WIDTH), "layers_per_block": 1, "sample_size": SIDE,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    },
    "UNet3DConditionModel": {
        **_STAGES, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "attention_head_dim": HEAD,
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    },
    "UNetMotionModel": {
        **_STAGES, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "num_attention_heads": 2,
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "motion_num_attention_heads": 2,
    },
    "UNetSpatioTemporalConditionModel": {
        "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "sample_size": SIDE,
        "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), "num_attention_heads": (2, 2),
        "block_out_channels": (32, WIDTH), "layers_per_block": 1, "cross_attention_dim": WIDTH, "num_frames": FRAMES,
        "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24,
    },
    "UVit2DModel": {
        "block_out_channels": TEXT, "in_channels": TEXT, "hidden_size": WIDTH, "encoder_hidden_size": TEXT,
        "cond_embed_dim": TEXT, "micro_cond_encode_dim": 8, "micro_cond_embed_dim": 40, "block_num_heads": 2,
        "num_hidden_layers": 2, "num_res_blocks": 1, "intermediate_size": 2 * WIDTH, "sample_size": SIDE,
    },
}  # fmt: skip
CONFIGS |= UNETS | controls.CONFIGS

_FLEX = "flex_attention, which it needs, has no backward on a CPU"
SKIPPED = {
    **controls.SKIPPED,
    "AnyFlowFARTransformer3DModel": _FLEX,
    "Kandinsky6SRTransformer3DModel": _FLEX,
    "MotionAdapter": "its modules are put into a UNetMotionModel; it has no forward of its own",
}
