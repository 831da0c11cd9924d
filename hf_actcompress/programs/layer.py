"""Patched layers: calls that the programs know run as programs, all other calls run module by module.

Every layer checks every call in every step, so the check has to be cheap. Module by module means the stock forward
of the layer over its patched children, with the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import compilation
from ..codecs import IDENTITY, Codec
from ..models.arguments import cache_in
from ..modules.base import ModuleMixin, Settings, has_hooks, is_sharded, recording
from ..modules.checkpoint import (
    CHECKPOINT_FUNCTION,
    WITH_ATTENTION,
    CheckpointSettings,
    KeptInput,
    forward_after_unpatching,
    function_of,
)
from ..modules.tiled import tiles_if_checkpointed
from ..ops.autocast import autocast_dtype
from ..private_apis import FakeTensor
from ..records import checkpointed as is_checkpointed
from .arguments import forward_names
from .checkpoint import is_plain
from .layer_code import LayerCode
from .look import Look
from .refusal import NotStraight
from .tape import Tape

# arguments that are checked below, and those that change nothing in a training step on whole sequences
_KNOWN = {
    "attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position",
    # these describe packed rows to kernels of other packages
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
    # the Trainer hands these to the model's loss, and models hand them to their layers, too
    "num_items_in_batch", "shift_labels",
}  # fmt: skip
# how many tensors every layer is given: its input, cosines and sines
_OF_ALL = 3
# fake tensors count as plain, or an estimate would take another path than the training
_PARAMETERS = {nn.Parameter, FakeTensor}


@dataclass(frozen=True, kw_only=True)
class LayerSettings(Settings):
    """Also a layer's programs, and how it is checkpointed.

    Args:
        other: The codec of activations that no patched module keeps, in a layer that runs by plans.
        kept: What it keeps where it is checkpointed; None: its input as it is.
        function: The checkpoint function that the model was given, or None: a compiler finds it here.
    """

    programs: Any
    kept: CheckpointSettings | None = None
    function: Any = None
    other: Codec = IDENTITY


class ProgramLayerMixin(ModuleMixin):
    """A layer that runs as programs."""

    actcompress: LayerSettings | None

    # FSDP, accelerate and device maps are told layers by the name of their class
    prefix = ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ProgramLayerMixin):
            return forward_after_unpatching(self, *args, **kwargs)
        settings = self.actcompress
        # in the graph of a module around it, a layer is a part of that graph
        if settings is not None and not compilation.is_traced():
            found = None if _in_tiles(self, args) and is_checkpointed() else settings.programs.run(self, args, kwargs)
            if found is not None:
                return found[0]
        return super().forward(*args, **kwargs)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        settings = self.actcompress
        kept = None if settings is None else settings.kept
        if settings is not None and kept is None and torch.compiler.is_compiling():
            # torch 2.11 cannot trace a look into __dict__ for the name of a property
            return settings.function  # type: ignore[no-any-return]
        checkpoint = function_of(self, kept)
        if settings is None or torch.compiler.is_compiling():
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
        if settings is not None and (layer.args or not has_hooks(self)) and not _in_tiles(self, args):
            keeps = KeptInput() if kept is None else KeptInput(kept.codec, kept.keeps == WITH_ATTENTION)
            found = settings.programs.run(self, args, layer.keywords, keeps)
            if found is not None:
                return found[0]
        return checkpoint(layer, *args)


def _in_tiles(layer: nn.Module, args: tuple[Any, ...]) -> bool:
    """Whether a checkpointed call runs module by module, because programs and plans compute all rows at once."""
    return bool(args) and isinstance(args[0], Tensor) and tiles_if_checkpointed(layer, args[0])


@dataclass
class LayerPrograms:
    """The programs of one layer. Deep-copies and pickles with the layer.

    Attributes:
        codes: By the dtypes of the layer's input and of autocast (None without it): the code that was proved right, or
            why there is none.
        prove: Makes the tape of a layer under an autocast, or raises NotStraight.
        names: The names of the layer's arguments behind the first one, in order.
        look: What the layer is made of, which each call checks.
        calls: How many calls ran as programs.
        leaf_calls: How many calls with gradients went module by module.
        why: Why the last of these did.
    """

    codes: dict[tuple[torch.dtype, torch.dtype | None], LayerCode | str]
    prove: Callable[[nn.Module, torch.dtype | None], Tape]
    names: tuple[str, ...]
    look: Look
    calls: int = 0
    leaf_calls: int = 0
    why: str = ""

    @classmethod
    def of(
        cls,
        layer: nn.Module,
        tape: Tape,
        autocast: torch.dtype | None,
        prove: Callable[[nn.Module, torch.dtype | None], Tape],
    ) -> LayerPrograms:
        code = LayerCode.of(layer, tape, autocast)
        return cls(
            {(code.dtype, autocast): code},
            prove,
            forward_names(layer)[2:],
            Look.at(layer),
        )

    def run(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: KeptInput | None = None
    ) -> tuple[Any] | None:
        """What the layer returns, in a tuple; None for a call that goes module by module.

        `keeps` is what it keeps of its input, if all else is to be made again in backward.
        """
        if keeps is not None and keeps.attention:
            return None
        checkpointed = None if keeps is None else keeps.codec
        if len(args) != 1:
            if not args or len(args) > 1 + len(self.names):
                return self._leaf_by_leaf("it has other arguments than its forward")
            kwargs = {**dict(zip(self.names, args[1:], strict=False)), **kwargs}
        x = args[0]
        if not isinstance(x, Tensor) or not self.look.holds():
            return self._leaf_by_leaf("a module in it has hooks or has changed since patch_model")
        dtypes = x.dtype, autocast_dtype(x)
        if dtypes not in self.codes:
            self._write_down(layer, dtypes)
        code = self.codes[dtypes]
        if isinstance(code, str):
            return self._leaf_by_leaf(code)
        why = _why_unknown(code, x, kwargs)
        if why is not None:
            return self._leaf_by_leaf(why)
        weights = [place.get(name) for place, name in code.places]
        if not _plain(weights):
            return self._leaf_by_leaf("a weight is no plain parameter")
        if not recording(x) or not (x.requires_grad or any([w is not None and w.requires_grad for w in weights])):
            return None
        found = code.run(x, weights, kwargs, is_sharded(layer), checkpointed)
        if found is None and checkpointed is None:
            return self._leaf_by_leaf("its attention or its mask is none that programs know")
        if found is not None:
            self.calls += 1
            # weights are read again in backward, if only to be cast
            again = checkpointed is not None or dtypes[1] is not None
            if self.look.adapters and (again or is_checkpointed()):
                self.look.refuse_merges(found[0])
        return found

    def _leaf_by_leaf(self, why: str) -> tuple[Any] | None:
        """Note for the report why a call goes module by module. Calls without gradients do not count."""
        if torch.is_grad_enabled():
            self.leaf_calls, self.why = self.leaf_calls + 1, why
        return None

    def _write_down(self, layer: nn.Module, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
        """Record the layer at its first call with an input of that dtype, under that autocast."""
        try:
            self.codes[dtypes] = LayerCode.of(layer, self.prove(layer, dtypes[1]), dtypes[1])
        except NotStraight as reason:
            self.codes[dtypes] = str(reason)


def _why_unknown(code: LayerCode, x: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why programs do not know this call in training; None if they know it."""
    if x.dim() != 3 or x.dtype != code.dtype or not x.numel() or not (x.is_contiguous() or code.any_order):
        return "its input has another dtype, shape or order in memory"
    cache = cache_in(kwargs.values())
    for name in kwargs.keys() - _KNOWN - code.inputs.keys() - code.masks:
        value = kwargs[name]
        if value is not None and value is not False and value is not cache:
            return f"it is called with {name}"
    if len(code.inputs) > _OF_ALL and not _has_inputs(code, x, kwargs):
        return "position biases or an encoder's states are given otherwise"
    angles = kwargs.get("position_embeddings")
    if angles is not None and not _are_given(angles, x, code.angles):
        return "position_embeddings are others than cosines and sines of its input's dtype"
    if cache is None or _takes(code, cache):
        return None
    return "its cache has keys and values already, or is of another kind"


def _takes(code: LayerCode, cache: Any) -> bool:
    """Whether the layer may fill that cache."""
    attentions = [module for module in code.attentions if module is not None]
    if not code.cached:
        return False
    if len(attentions) == 1 and type(cache).__name__ == "EncoderDecoderCache":
        # stock's code would take only one of the two caches in it
        return False
    return all(_is_empty(cache, module.layer_idx) for module in attentions)


def _has_inputs(code: LayerCode, x: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether ALiBi, encoder states and position biases are given as they were when the layer was recorded."""
    if "alibi" in code.inputs and type(kwargs.get("alibi")) is not type(x):
        return False
    if "encoder_hidden_states" in code.inputs:
        states = kwargs.get("encoder_hidden_states")
        if type(states) is not type(x) or states.dim() != 3 or (code.autocast is None and states.dtype != x.dtype):
            return False
    biases = [kwargs.get(name) for name, _ in code.biases]
    return all(bias is None or (type(bias) is type(x) and bias.dim() == 4) for bias in biases)


def _are_given(angles: Any, x: Tensor, width: int) -> bool:
    """Whether these are cosines and sines of that width that want no gradient."""
    if type(angles) is not tuple or len(angles) != 2:
        return False
    cos = angles[0]
    return cos.dtype == x.dtype and cos.size(-1) == width and cos.dim() == 3 and not cos.requires_grad


def _is_empty(cache: Any, layer: int) -> bool:
    """Whether a cache keeps keys and values as they are, hands them back, and has none of that layer yet."""
    if type(cache).__name__ == "EncoderDecoderCache":
        both = cache.self_attention_cache, cache.cross_attention_cache
        return not cache.is_updated.get(layer) and all(_is_empty(one, layer) for one in both)
    if type(cache).__name__ != "DynamicCache":
        return False
    return len(cache.layers) <= layer or cache.get_seq_length(layer) == 0


def _plain(weights: list[Any]) -> bool:
    """Whether all weights are plain parameters. ZeRO-3's are not: they are gathered by hooks that only a call runs."""
    if not {type(w) for w in weights} <= _PARAMETERS:
        return False
    return "deepspeed" not in sys.modules or not any(hasattr(w, "ds_id") for w in weights)
