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
from functools import cache, partial
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

# the positions of the forward in progress, and the sequences in them
_packed: ContextVar[tuple[Tensor, Sequences] | None] = ContextVar("packed", default=None)


def packed_forward(model: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What runs in place of the stock forward of a model for this call; None where its rows are not packed.

    None also for a call under no_grad, with a mask, of a model that makes its masks in another way or has compiled
    parts. The positions are looked at once, for which the host waits, as it does in stock.
    """
    positions = kwargs.get("position_ids")
    if type(positions) is not Tensor or positions.dim() != 2 or positions.device.type == "meta":
        return None
    if kwargs.get("attention_mask") is not None or not torch.is_grad_enabled() or transforms_active():
        return None
    kind: Any = type(model)
    copy = _copy(kind)
    if copy is None or not copy.is_of(kind) or _has_compiled_parts(model):
        return None
    sequences = sequences_of(positions)
    if sequences is None:
        return None
    return partial(_run, MethodType(copy.copy, model), (positions, sequences))


def _run(forward: Callable[..., Any], packed: tuple[Tensor, Sequences], *args: Any, **kwargs: Any) -> Any:
    token = _packed.set(packed)
    try:
        return forward(*args, **kwargs)
    finally:
        _packed.reset(token)


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


def _has_compiled_parts(model: Any) -> bool:
    """Whether a part is compiled: its graph takes stock's mask."""
    return any(_is_compiled(module) or "_orig_mod" in module._modules for module in model.modules())


def _is_compiled(module: Any) -> bool:
    call = module.__dict__.get("_compiled_call_impl")
    while isinstance(call, partial):
        # `memory_report` looks at what a call does
        call = call.args[-1]
    return call is not None and getattr(call, "__func__", None) is not nn.Module._call_impl


def _maker(stock: Callable[..., Any], sliding: bool) -> Callable[..., Any]:
    """The mask that stock's function makes: for packed rows without its memory."""
    signature = inspect.signature(stock)

    def make(*args: Any, **kwargs: Any) -> Any:
        packed = _packed.get()
        given = signature.bind(*args, **kwargs).arguments
        if packed is None or not _is_plain(given, packed[0]):
            return stock(*args, **kwargs)
        embeds, sequences = given["inputs_embeds"], packed[1]
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
