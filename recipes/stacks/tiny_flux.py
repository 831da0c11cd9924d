"""The tiny model of `diffusers_lora.py`."""

from pathlib import Path

import torch


def save(folder: Path) -> str:
    """Saves a Flux of two blocks of each kind, for latents of 16 channels, as a pipeline's folder has it."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    widths = {"attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (4, 6, 6)}
    inputs = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    model = FluxTransformer2DModel(patch_size=1, num_layers=2, num_single_layers=2, **widths, **inputs)
    model.save_pretrained(folder / "transformer")
    return str(folder)
