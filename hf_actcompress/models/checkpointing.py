"""Gradient checkpointing of single layers, by the flag that transformers' layers have, and how inputs are kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from ..codecs import CODECS, IDENTITY
from ..config import CompressionConfig
from ..errors import UnknownOptionError
from ..modules.base import Settings
from ..modules.checkpoint import CHECKPOINT_FUNCTION, CheckpointInputMixin
from .sites import Site

_FLAGS = ("gradient_checkpointing", CHECKPOINT_FUNCTION)
# where a layer keeps what its flags were before
_BEFORE = "actcompress_checkpointing"


def switch_on(model: nn.Module, parts: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Let every layer below one of the dotted `parts` of a name be computed again in backward; yields those layers.

    Raises:
        UnknownOptionError: A part under which there is no layer that transformers can checkpoint.
    """
    layers = checkpointable(model)
    for part in parts:
        if not any(below(name, part) for name in layers):
            raise UnknownOptionError("layer to checkpoint", part, layers)
    outer: list[str] = []
    for name, layer in layers.items():
        # a layer inside of one that is computed again is computed again with it
        if any(below(name, part) for part in parts) and not any(name.startswith(f"{o}.") for o in outer):
            outer.append(name)
            _switch_on(layer)
            yield name, layer


def find_checkpoint_input(module: nn.Module, config: CompressionConfig) -> Site | None:
    """How the input of a layer is kept where the layer is checkpointed; None if as it is."""
    codec = CODECS[config.checkpoint_input]
    if codec == IDENTITY or not isinstance(module, GradientCheckpointingLayer):
        return None
    options = (module.__dict__.get(CHECKPOINT_FUNCTION),)
    return Site(CheckpointInputMixin, Settings("checkpoint_input", "packed", options, codec=codec))


def checkpointable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that transformers can checkpoint, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def below(name: str, part: str) -> bool:
    """Whether a dotted part of a name covers the module of that name."""
    return f".{part}." in f".{name}."


def _switch_on(layer: Any) -> None:
    if _BEFORE in layer.__dict__:
        return
    layer.__dict__[_BEFORE] = {flag: layer.__dict__[flag] for flag in _FLAGS if flag in layer.__dict__}
    if not layer.gradient_checkpointing:
        # what `gradient_checkpointing_disable` leaves behind is not what anybody asked for
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    layer.gradient_checkpointing = True


def is_switched_on(module: nn.Module) -> bool:
    """Whether `switch_on` lets this layer be computed again."""
    return _BEFORE in module.__dict__


def restore_checkpointing(module: nn.Module) -> None:
    """Give a layer its own flags back. Harmless on any other module."""
    before = module.__dict__.pop(_BEFORE, None)
    if before is not None:
        for flag in _FLAGS:
            module.__dict__.pop(flag, None)
        module.__dict__.update(before)
