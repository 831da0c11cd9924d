"""Gradient checkpointing of single layers, by the flag of transformers' layers, and how their inputs are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ..codecs import IDENTITY
from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..errors import UnknownOptionError
from ..modules.checkpoint import CHECKPOINT_FUNCTION, WITH_ATTENTION, CheckpointInputMixin, CheckpointSettings
from ..roles import Role
from .sites import Site

_FLAGS = ("gradient_checkpointing", CHECKPOINT_FUNCTION)
# the attribute of a layer that keeps its former flags
_BEFORE = "actcompress_checkpointing"

# the options that a plain checkpoint may have
_PLAIN = {"use_reentrant": False, "preserve_rng_state": True}


def is_plain(function: Any) -> bool:
    """Whether a function is torch's non-reentrant checkpoint with its default options."""
    # an estimate puts a stand-in in its place
    function = getattr(function, "stands_for", function)
    if (
        not isinstance(function, partial)
        or function.args
        or function.func not in (checkpoint, checkpoint_without_cache)
    ):
        return False
    told = function.keywords
    return told.get("use_reentrant") is False and all(_PLAIN.get(name) is value for name, value in told.items())


def switch_on(model: nn.Module, asked: tuple[str, ...] | str) -> None:
    """Let the layers that `layers_asked_for` finds be recomputed in backward.

    Raises:
        UnknownOptionError: As `layers_asked_for`.
    """
    layers = checkpointable(model)
    for name in layers_asked_for(model, asked):
        layer: Any = layers[name]
        if _BEFORE in layer.__dict__:
            continue
        layer.__dict__[_BEFORE] = {flag: layer.__dict__[flag] for flag in _FLAGS if flag in layer.__dict__}
        if not layer.gradient_checkpointing:
            # a function that `gradient_checkpointing_disable` has left behind was not asked for
            layer._gradient_checkpointing_func = partial(checkpoint_without_cache, use_reentrant=False)
        layer.gradient_checkpointing = True


def layers_asked_for(model: nn.Module, asked: tuple[str, ...] | str) -> tuple[str, ...]:
    """The names of the layers that `CompressionConfig.checkpoint` means, without layers inside of others.

    Raises:
        UnknownOptionError: A part of a name under which there is no layer that transformers can checkpoint, or a
            shorthand for a model without any.
    """
    layers = checkpointable(model)
    parts = (asked,) if isinstance(asked, str) else asked
    chosen = list(layers)
    if isinstance(asked, tuple):
        chosen = [name for name in layers if any(below(name, part) for part in asked)]
    for part in parts:
        if not layers or (isinstance(asked, tuple) and not any(below(name, part) for name in layers)):
            raise UnknownOptionError("layer to checkpoint", part, layers)
    # layers inside of a checkpointed layer are recomputed with it
    outer = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
    if isinstance(asked, tuple):
        return tuple(outer)
    kind, _, number = asked.partition(":")
    return tuple(outer[:: int(number)] if kind == "every" else outer[: len(outer) - int(number)])


def find_checkpoint_input(module: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of a layer whose checkpoint keeps something else than the input as it is; None for other modules."""
    codec, keeps = CODECS[config.checkpoint_input], "input"
    if config.checkpoint_attention == "kept":
        keeps = WITH_ATTENTION
    elif codec == IDENTITY:
        return None
    if not isinstance(module, GradientCheckpointingLayer):
        return None
    function = module.__dict__.get(CHECKPOINT_FUNCTION)
    settings = CheckpointSettings(Role.CHECKPOINT_INPUT, "packed", codec, keeps, function=function)
    return Site(CheckpointInputMixin, settings)


def checkpointable(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that transformers can checkpoint, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def below(name: str, part: str) -> bool:
    """Whether a dotted part of a name covers the module of that name."""
    return f".{part}." in f".{name}."


def checkpoint_without_cache(layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's checkpoint. It leaves caches out, because the second run would fill them once more.

    transformers removes the cache from the keywords, but GPT-2 passes it to its layers by position. A model that is
    checkpointed as a whole makes no cache.
    """
    return checkpoint(layer, *(None if isinstance(arg, Cache) else arg for arg in args), **kwargs)


def is_switched_on(module: nn.Module) -> bool:
    """Whether `switch_on` lets this layer be recomputed."""
    return _BEFORE in module.__dict__


def restore_checkpointing(module: nn.Module) -> None:
    """Give a layer its own flags back. Harmless on any other module."""
    before = module.__dict__.pop(_BEFORE, None)
    if before is not None:
        for flag in _FLAGS:
            module.__dict__.pop(flag, None)
        module.__dict__.update(before)
