"""Layers that decide what is kept of them when they are checkpointed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from .. import compilation, ops
from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ..records import kept_through
from .base import PatchedModule, Settings, recording

CHECKPOINT_FUNCTION = "_gradient_checkpointing_func"
# the name of what a layer keeps if its attention must not run again
WITH_ATTENTION = "input, results of attention"


class KeptInput(NamedTuple):
    """What a checkpointed layer keeps.

    Args:
        codec: The codec through which it keeps its first input.
        attention: Whether it keeps the results of attention, too, so that attention does not run again.
    """

    codec: Codec = IDENTITY
    attention: bool = False


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Settings):
    """Settings with the checkpoint function that the model was given, or None. A compiler reads it from here."""

    function: Any


class CheckpointInputMixin(PatchedModule):
    """transformers' GradientCheckpointingLayer. It goes on to use the checkpoint function that the model was given."""

    actcompress: CheckpointSettings | None

    # FSDP, accelerate and device maps are told layers by the name of their class
    prefix = ""

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        return function_of(self, self.actcompress)

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable[..., Any]) -> None:
        self.__dict__[CHECKPOINT_FUNCTION] = function
        if self.actcompress is not None:
            self.__dict__["actcompress"] = replace(self.actcompress, function=function)


def forward_after_unpatching(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """The stock forward of a layer that was unpatched between a forward and its backward.

    transformers checkpoints the forward of the layer's class. So a reentrant checkpoint runs the forward of the patched
    class again, although the layer is not of this class any more.
    """
    return type(layer).forward(layer, *args, **kwargs)


def function_of(layer: Any, settings: CheckpointSettings | None) -> Callable[..., Any]:
    """The checkpoint function that a layer was given, made to keep what the settings say, if there are settings."""
    if settings is not None and is_compiling():
        # torch 2.11 cannot trace a look into __dict__ for the name of a property
        return partial(_checkpoint, settings.function, settings)
    if CHECKPOINT_FUNCTION not in layer.__dict__:
        raise AttributeError(f"{type(layer).__name__!r} has no attribute {CHECKPOINT_FUNCTION!r}")
    checkpoint = layer.__dict__[CHECKPOINT_FUNCTION]
    return checkpoint if settings is None else partial(_checkpoint, checkpoint, settings)


def _checkpoint(
    checkpoint: Callable[..., Any], settings: Settings, layer: Callable[..., Any], x: Any, *args: Any
) -> Any:
    """``checkpoint(layer, x, *args)``, which keeps x through the codec and, if asked to, the results of attention."""
    packable = isinstance(x, Tensor) and x.is_floating_point() and x.numel()
    if not packable or not recording(x):
        return checkpoint(layer, x, *args)
    if is_compiling():
        return checkpoint(layer, compilation.keep(x, settings.codec_name), *args)
    region = ops.Region(layer) if settings.keeps == WITH_ATTENTION else None
    with kept_through(settings.codec, x) if settings.codec != IDENTITY else nullcontext():
        y = checkpoint(region or layer, x, *args)
    if region is not None:
        region.keep()
    return y
