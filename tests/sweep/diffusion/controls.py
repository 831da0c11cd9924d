"""The arguments and inputs of controlnets: a condition beside those of the model that they control."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .inputs import FRAMES, ROWS, SIDE, WORDS, noise, ones
from .sizes import HEAD, HEADS, TEXT, WIDTH

_STAGES = {
    "norm_num_groups": 8, "cross_attention_dim": WIDTH, "block_out_channels": (32, WIDTH), "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": HEADS,
    "conditioning_embedding_out_channels": (8, 16),
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "ControlNetModel": _STAGES,
    "ControlNetUnionModel": {
        **_STAGES, "num_trans_channel": 32, "num_trans_head": 2, "num_proj_channel": 32,
        "addition_time_embed_dim": 8,
    },
    "HunyuanDiT2DControlNetModel": {
        "in_channels": 4, "patch_size": 2, "sample_size": SIDE, "cross_attention_dim": TEXT, "text_len": WORDS,
        "transformer_num_layers": 4, "cross_attention_dim_t5": TEXT, "text_len_t5": WORDS,
        "use_style_cond_and_image_meta_size": False,
    },
    "SparseControlNetModel": {
        **_STAGES, "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"), "motion_num_attention_heads": 2,
    },
    "UNetControlNetXSModel": {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "sample_size": SIDE, "norm_num_groups": 8,
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "block_out_channels": (32, WIDTH),
        "num_attention_heads": 2, "cross_attention_dim": WIDTH, "ctrl_block_out_channels": (16, 16),
        "ctrl_max_norm_num_groups": 4, "ctrl_conditioning_embedding_out_channels": (8, 16),
        "ctrl_num_attention_heads": 2,
    },
}  # fmt: skip


def _picture(config: Any) -> dict[str, Any]:
    """A picture's latents, and the picture that controls them, which has twice as many pixels a side."""
    return {
        "sample": noise(ROWS, 4, SIDE, SIDE), "encoder_hidden_states": noise(ROWS, WORDS, WIDTH),
        "controlnet_cond": noise(ROWS, 3, 2 * SIDE, 2 * SIDE),
    }  # fmt: skip


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "ControlNetModel": _picture,
    "ControlNetUnionModel": lambda c: {
        **_picture(c), "controlnet_cond": [noise(ROWS, 3, 2 * SIDE, 2 * SIDE)], "control_type_idx": [1],
        "control_type": torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0, 0.0]] * ROWS),
    },
    "FluxControlNetModel": lambda c: {"controlnet_cond": noise(ROWS, SIDE * SIDE, c["in_channels"], seed=3)},
    "HunyuanDiT2DControlNetModel": lambda c: {
        "controlnet_cond": noise(ROWS, 4, SIDE, SIDE, seed=3), "encoder_hidden_states": noise(ROWS, WORDS, TEXT),
        "encoder_hidden_states_t5": noise(ROWS, WORDS, TEXT, seed=3), "text_embedding_mask": ones(ROWS, WORDS),
        "text_embedding_mask_t5": ones(ROWS, WORDS),
        "image_rotary_emb": (noise(64, HEAD).cos(), noise(64, HEAD).sin()),
    },
    "QwenImageControlNetModel": lambda c: {"controlnet_cond": noise(ROWS, SIDE * SIDE, c["in_channels"], seed=3)},
    "SD3ControlNetModel": lambda c: {"controlnet_cond": noise(ROWS, c["in_channels"], SIDE, SIDE, seed=3)},
    "SanaControlNetModel": lambda c: {"controlnet_cond": noise(ROWS, c["in_channels"], SIDE, SIDE, seed=3)},
    "SparseControlNetModel": lambda c: {
        "sample": noise(ROWS, 4, FRAMES, SIDE, SIDE), "controlnet_cond": noise(ROWS, 4, FRAMES, SIDE, SIDE, seed=3),
        "encoder_hidden_states": noise(ROWS * FRAMES, WORDS, WIDTH),
        "conditioning_mask": torch.ones(ROWS, 1, FRAMES, SIDE, SIDE),
    },
    "UNetControlNetXSModel": _picture,
}  # fmt: skip
_LIST = "a list of other controlnets, whose outputs it adds up"
SKIPPED = dict.fromkeys(
    ("FluxMultiControlNetModel", "HunyuanDiT2DMultiControlNetModel", "MultiControlNetModel",
     "MultiControlNetUnionModel", "QwenImageMultiControlNetModel", "SD3MultiControlNetModel"), _LIST
)  # fmt: skip
SKIPPED["CosmosControlNetModel"] = "it needs torchvision, which is not among what the tests install"
SKIPPED["ControlNetXSAdapter"] = "its modules are put into a UNetControlNetXSModel; its forward raises"
SKIPPED["ZImageControlNetModel"] = "it runs with the blocks of a ZImageTransformer2DModel, which it is given"
