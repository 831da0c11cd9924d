"""Patched layers and blocks: calls that have a plan run by it, all other calls run module by module.

Module by module means the stock forward of the layer over its patched children, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import compilation
from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ..models.checkpointing import is_plain
from ..modules.base import ModuleMixin, Settings, has_hooks
from ..modules.checkpoint import (
    CHECKPOINT_FUNCTION,
    WITH_ATTENTION,
    CheckpointSettings,
    KeptInput,
    forward_after_unpatching,
    function_of,
)
from ..modules.tiled import has_many_rows, has_tiles, tiles_if_checkpointed
from ..records import checkpointed as is_checkpointed


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """The settings of a layer: its plans, and how it is checkpointed.

    Args:
        plans: The plans.
        selective: Whether products of activations are recomputed in backward.
        compile: Whether Inductor makes the code of its plans.
        other: The codec of activations that no patched module keeps, in it.
        kept: What it keeps where it is checkpointed; None: its input as it is.
        function: The checkpoint function that the model was given, or None: a compiler finds it here.
    """

    plans: Any
    kept: CheckpointSettings | None = None
    function: Any = None
    other: Codec = IDENTITY
    selective: bool = True
    compile: bool = False

    @property
    def of_plan(self) -> tuple[bool, ...]:
        """What of these settings a plan depends on. Layers whose codecs differ share a plan if this is equal."""
        return self.codec != IDENTITY, self.other != IDENTITY, self.selective, self.compile


class PlannedLayerMixin(ModuleMixin):
    """A layer that runs by plans."""

    actcompress: LayerSettings | None

    # FSDP, accelerate and device maps are told layers by the name of their class
    prefix = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PlannedLayerMixin):
            return forward_after_unpatching(self, *args, **kwargs)
        settings = self.actcompress
        # in the graph of a module around it, a layer is a part of that graph
        if settings is not None and not compilation.is_traced():
            found = None if is_checkpointed() and _in_tiles(self, args) else settings.plans.run(self, args, kwargs)
            if found is not None:
                return found[0]
        return super().forward(*args, **kwargs)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        settings = self.actcompress
        kept = None if settings is None else settings.kept
        if settings is not None and kept is None and is_compiling():
            # torch 2.11 cannot trace a look into __dict__ for the name of a property
            return settings.function  # type: ignore[no-any-return]
        checkpoint = function_of(self, kept)
        if settings is None or is_compiling():
            return checkpoint
        # a checkpoint function other than torch's plain one runs unchanged, as the user has set it up
        plain = is_plain(self.__dict__[CHECKPOINT_FUNCTION])
        return partial(self._checkpointed, checkpoint, kept) if plain else checkpoint

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable[..., Any]) -> None:
        self.__dict__[CHECKPOINT_FUNCTION] = function
        settings = self.actcompress
        if settings is not None:
            kept = None if settings.kept is None else replace(settings.kept, function=function)
            self.__dict__["actcompress"] = replace(settings, kept=kept, function=function)

    def _checkpointed(self, checkpoint: Callable[..., Any], kept: Settings | None, layer: Any, *args: Any) -> Any:
        """``checkpoint(layer, *args)``, where `layer` may be a partial of this layer's forward, or of a call of it.

        Blocks of diffusers give the modules inside of them to their function.
        """
        settings = self.actcompress
        own = isinstance(layer, partial) and any(
            x is self for x in (*layer.args, getattr(layer.func, "__self__", None))
        )
        if not own:
            return checkpoint(layer, *args)
        # without args `layer` is a call of the layer, which would run its hooks, too
        if settings is not None and (layer.args or not has_hooks(self)):
            keeps = KeptInput() if kept is None else KeptInput(kept.codec, kept.keeps == WITH_ATTENTION)
            found = settings.plans.run(self, args, layer.keywords, keeps)
            if found is not None:
                return found[0]
        return checkpoint(layer, *args)


def _in_tiles(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether a call computes an MLP in tiles. Where a checkpoint function of others runs the layer again, it goes
    module by module then: the second run ends before the MLP, and a plan's would not."""
    many = bool(args) and isinstance(args[0], Tensor) and has_many_rows(args[0])
    return has_tiles(layer) or (many and tiles_if_checkpointed(layer))
