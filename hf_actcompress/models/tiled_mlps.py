"""Which modules compute each row by itself, and how many rows a tile of them has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import settings_of, stock_type
from ..modules.tiled import TiledMixin, TiledSettings
from ..roles import Role
from .probe import StandIn, asked_once, bare_copy, probe_rows, takes_one_tensor, undisturbed
from .sites import Site

_LINEAR = (nn.Linear, Conv1D)
# rows; a smaller tile does not fill a device
_SMALLEST = 256


def find_tiled_mlp(module: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of an MLP of linear layers, activations and dropout, if tiles were asked for."""
    if not config.tiled_mlp or settings_of(module) is not None or "forward" in module.__dict__:
        return None
    linear = [child for child in module.children() if isinstance(_base_layer(child), _LINEAR)]
    others = [child for child in module.children() if child not in linear]
    weights = any(next(child.parameters(), None) is not None for child in others)
    if len(linear) < 2 or len(linear) + len(others) < 3 or weights or module._parameters:
        return None
    last = asked_once(module, _last_by_rows) if takes_one_tensor(module) else None
    if last is None:
        return None
    settings = TiledSettings(Role.TILED_MLP, codec=CODECS[config.mlp], last=last)
    return Site(TiledMixin, tiled_settings(settings, module, config))


def tiled_settings(settings: TiledSettings, module: nn.Module, config: CompressionConfig) -> TiledSettings:
    """The settings of an MLP, with the rows of a tile if tiles were asked for."""
    if not config.always_in_tiles:
        return replace(settings, checkpointed=bool(config.tiled_mlp))
    tile = config.tiled_mlp if isinstance(config.tiled_mlp, int) else max(_SMALLEST, _width(module) // 2)
    return replace(settings, tile=tile, keeps="its input")


def _width(module: nn.Module) -> int:
    """How many features the first layer with a matrix reads.

    The matrix of a quantised layer is packed, so the number is read from the layer, not from the matrix's shape.
    """
    for part in module.modules():
        for p in part._parameters.values():
            if p is not None and p.dim() == 2:
                return int(getattr(part, "in_features", p.shape[-1]))
    return 0


def _base_layer(module: Any) -> nn.Module:
    """The layer inside of PEFT's adapters, which may be around one another (`PeftMixedModel`)."""
    base: nn.Module = module
    while (inner := base.__dict__.get("_modules", {}).get("base_layer")) is not None:
        base = inner
    return base


def _last_by_rows(module: nn.Module) -> str | None:
    """The name of the linear layer that makes the output, "" if something else does; None if rows depend on each other.

    The module runs on all rows and on each alone, with stand-ins for its linear layers: no weight is read.
    """
    probe = bare_copy(module)
    for index, (name, child) in enumerate(module._modules.items()):
        if child is not None and isinstance(_base_layer(child), _LINEAR):
            probe._modules[name] = StandIn(index)
        elif isinstance(child, nn.Dropout):
            probe._modules[name] = nn.Identity()
        elif child is not None:
            # without its hooks
            probe._modules[name] = bare_copy(child)
    x = probe_rows(24)
    forward = stock_type(probe).forward
    try:
        with undisturbed():
            whole = forward(probe, x)
            last = [name for name, part in probe._modules.items() if getattr(part, "returned", None) is whole]
            parts = [forward(probe, x[:, i : i + 1]) for i in range(x.shape[1])]
    except Exception:
        return None
    # not bit by bit: a CPU computes the last elements of a tensor with other instructions
    by_rows = whole.shape == x.shape and torch.allclose(whole, torch.cat(parts, dim=1), rtol=1e-4, equal_nan=True)
    return "".join(last[:1]) if by_rows else None
