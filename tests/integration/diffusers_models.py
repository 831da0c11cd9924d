"""Tiny models of diffusers, with a batch each: latents of 32 x 32 or some video frames, and states of a caption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)
from torch import Tensor, nn

Batch = dict[str, Any]
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
TIMES = [300, 700]


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def flux() -> tuple[nn.Module, Batch]:
    sizes = {"num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = FluxTransformer2DModel(patch_size=1, in_channels=16, axes_dims_rope=(4, 6, 6), **HEADS, **sizes)
    places = torch.zeros(256, 3)
    places[:, 1:] = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    batch = {"hidden_states": noise(2, 256, 16), "encoder_hidden_states": noise(2, 32, 32)}
    batch |= {"pooled_projections": noise(2, 32), "timestep": torch.tensor(TIMES) / 1000}
    return model, batch | {"img_ids": places, "txt_ids": torch.zeros(32, 3)}


def sd3() -> tuple[nn.Module, Batch]:
    sizes = {"sample_size": 32, "in_channels": 4, "out_channels": 4, "num_layers": 3, "pos_embed_max_size": 32}
    widths = {"joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 64}
    batch = {"hidden_states": noise(2, 4, 32, 32), "encoder_hidden_states": noise(2, 32, 32)}
    batch |= {"pooled_projections": noise(2, 64), "timestep": torch.tensor(TIMES)}
    return SD3Transformer2DModel(patch_size=2, **HEADS, **sizes, **widths), batch


def unet() -> tuple[nn.Module, Batch]:
    model = UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    batch = {"sample": noise(2, 4, 32, 32), "timestep": torch.tensor(TIMES), "encoder_hidden_states": noise(2, 16, 32)}
    return model, batch


def wan() -> tuple[nn.Module, Batch]:
    sizes = {"in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 128, "num_layers": 3}
    model = WanTransformer3DModel(patch_size=(1, 2, 2), cross_attn_norm=True, rope_max_seq_len=32, **HEADS, **sizes)
    video, caption = noise(2, 4, 2, 32, 32), noise(2, 16, 32)
    return model, {"hidden_states": video, "timestep": torch.tensor(TIMES), "encoder_hidden_states": caption}


def ltx() -> tuple[nn.Module, Batch]:
    sizes = {"in_channels": 16, "out_channels": 16, "cross_attention_dim": 64, "num_layers": 3, "caption_channels": 32}
    batch = {"hidden_states": noise(2, 512, 16), "encoder_hidden_states": noise(2, 16, 32)}
    batch |= {"timestep": torch.tensor(TIMES), "encoder_attention_mask": torch.ones(2, 16, dtype=torch.long)}
    return LTXVideoTransformer3DModel(**HEADS, **sizes), batch | {"num_frames": 2, "height": 16, "width": 16}


MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "flux": flux, "sd3": sd3, "unet": unet, "wan": wan, "ltx": ltx,
}  # fmt: skip


def build(name: str) -> tuple[Any, Batch]:
    """The model in train mode, and its batch. No weight is zero at the start, or gradients would be zero, too."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return model.train(), batch
