"""Packed batches: rows of several sequences, whose positions start again. Their masks are not made.

transformers makes a mask [B, 1, T, T] of such a batch when a model has neither a 2-D mask nor a cache. The model's
forward looks the function that makes it up among the globals of the modeling file. A patched model runs a copy of that
forward (see copies.py) that finds ours under its name. Ours returns a `PackedMask`: patched attention reads off it
where the sequences are, and anything else that reads it gets the mask that stock's function makes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, cached_property, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import masking_utils

from ..ops import PackedMask
from ..private_apis import transforms_active
from ..reference.sequences import Sequences, sequences_of
from .copies import GlobalsCopy, global_names

# stock's makers of masks -> whether a window slides
_MAKERS = {"create_causal_mask": False, "create_sliding_window_causal_mask": True}
# what they may be given
_KNOWN = {"config", "inputs_embeds", "position_ids", "layer_idx"}


class _Call:
    """One forward of a model, and the sequences in its rows: looked for once, if stock would look."""

    def __init__(self, model: Any, positions: Tensor) -> None:
        self.model, self.positions = model, positions

    @cached_property
    def sequences(self) -> Sequences | None:
        """None where each row is one, and where parts of the model are compiled: their graphs take stock's mask."""
        found = sequences_of(self.positions)
        return found if found is None or not any(map(_is_compiled, self.model.modules())) else None


# the forward in progress
_call: ContextVar[_Call | None] = ContextVar("call", default=None)


def packed_forward(model: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What runs in place of the stock forward of a model for a call whose rows may be packed; None for other calls.

    Those are calls without positions, with a mask or under no_grad, and models that make their masks in another way.
    The host waits for the positions where it does in stock: when a mask is made and there is no cache.
    """
    positions = kwargs.get("position_ids")
    if type(positions) is not Tensor or positions.dim() != 2 or positions.device.type == "meta":
        return None
    if kwargs.get("attention_mask") is not None or not torch.is_grad_enabled() or transforms_active():
        return None
    kind: Any = type(model)
    copy = _copy(kind)
    if copy is None or not copy.is_of(kind):
        return None
    return partial(_run, MethodType(copy.copy, model), _Call(model, positions))


def _run(forward: Callable[..., Any], call: _Call, *args: Any, **kwargs: Any) -> Any:
    token = _call.set(call)
    try:
        return forward(*args, **kwargs)
    finally:
        _call.reset(token)


@cache
def _copy(stock_class: Any) -> GlobalsCopy | None:
    """A copy of the class's forward that finds our makers of masks; None if it calls none of stock's."""
    inner = inspect.unwrap(stock_class.forward)
    if not inspect.isfunction(inner):
        return None
    found = global_names(inner.__code__)
    ours = {
        name: _maker(getattr(masking_utils, name), sliding)
        for name, sliding in _MAKERS.items()
        if name in found and inner.__globals__.get(name) is getattr(masking_utils, name)
    }
    try:
        return GlobalsCopy(stock_class.forward, ours) if ours else None
    except ValueError:
        return None


def _is_compiled(module: Any) -> bool:
    if "_orig_mod" in module._modules:
        return True
    call = module.__dict__.get("_compiled_call_impl")
    while isinstance(call, partial):
        # `memory_report` looks at what a call does
        call = call.args[-1]
    return call is not None and getattr(call, "__func__", None) is not nn.Module._call_impl


def _maker(stock: Callable[..., Any], sliding: bool) -> Callable[..., Any]:
    """The mask that stock's function makes: for packed rows without its memory."""
    signature = inspect.signature(stock)

    def make(*args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        given = signature.bind(*args, **kwargs).arguments
        sequences = call.sequences if call is not None and _is_plain(given, call.positions) else None
        if sequences is None:
            return stock(*args, **kwargs)
        embeds = given["inputs_embeds"]
        window = given["config"].sliding_window if sliding else None
        if embeds.shape[:2] != (sequences.rows, sequences.tokens) or (sliding and not window):
            return stock(*args, **kwargs)
        # what is asked of the embeddings is their shape, dtype and device
        like = embeds.new_empty(()).expand(embeds.shape)
        return PackedMask(sequences, window, partial(stock, **{**given, "inputs_embeds": like}), embeds.device)

    return make


def _is_plain(given: dict[str, Any], positions: Tensor) -> bool:
    """Whether nothing but the positions decides what the mask is."""
    if given.get("position_ids") is not positions or torch.compiler.is_compiling():
        return False
    if any(value is not None for name, value in given.items() if name not in _KNOWN):
        return False
    config = given["config"]
    return bool(config._attn_implementation == "sdpa" and getattr(config, "is_causal", True) is not False)
