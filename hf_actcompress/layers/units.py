"""Which modules of a model run by plans: its layers, and blocks of a stack that no model calls a layer."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ..modules.base import settings_of


def units_of(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers may checkpoint, and the outermost blocks in lists of blocks without such layers."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    known = {id(part) for layer in layers for part in layer.modules()}
    for blocks in model.modules():
        if not isinstance(blocks, nn.ModuleList) or id(blocks) in known:
            continue
        for block in blocks:
            if id(block) not in known and _is_block(block):
                layers.append(block)
                known.update(map(id, block.modules()))
    return layers


def _is_block(module: nn.Module) -> bool:
    """Whether a module may be a block: it has children that compute, and no model or layer inside."""
    parts = list(module.modules())
    if len(parts) == 1 or settings_of(module) is not None or isinstance(module, nn.ModuleList):
        return False
    return not any(isinstance(part, (GradientCheckpointingLayer, PreTrainedModel)) for part in parts)
