"""Packed batches, sliding windows and chunks: their masks [B, 1, T, T] are not made.

transformers makes such a mask for rows of several sequences (their positions start again) if a call has neither a 2-D
mask nor a cache; for any rows in layers that see a window or a chunk; and for rows with padding. The model's forward
looks up the function that makes the mask among the globals of the modeling file. A patched model runs a copy of that
forward (function_copies.py) that finds our function under the same name. It returns a `PackedMask`: patched
attention reads from it where the sequences are, and anything else that reads it gets the mask that stock's function
makes.
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
from transformers import DynamicCache, masking_utils

from ..compiling import is_compiling
from ..modules.base import PLAIN_TENSORS, stock_type
from ..ops import PackedMask
from ..private_apis import transforms_or_export
from ..reference.sequences import Band, Sequences, sequences_of
from .arguments import cache_in
from .attention_rows import calls_interface, goes_in_rows
from .function_copies import GlobalsCopy, copy_of_forward, read_global

# stock's mask function -> the config's field that says how far a query sees, and whether it is causal
_MAKERS = {
    "create_causal_mask": (None, True),
    "create_sliding_window_causal_mask": ("sliding_window", True),
    "create_chunked_causal_mask": ("attention_chunk_size", True),
    "create_bidirectional_mask": (None, False),
    "create_bidirectional_sliding_window_mask": ("sliding_window", False),
}
# the arguments that these functions may get, beside a cache
_KNOWN = {"config", "inputs_embeds", "attention_mask", "position_ids", "layer_idx"}
# in elements: a smaller mask is made if each row is one sequence, because with it the bits are stock's
SMALLEST_MASK = 2**20


class _Call:
    """One forward of a model and the sequences in its rows. They are searched for once, and only if stock searches.

    Args:
        model: The model.
        positions: The positions that the model was given; None: it counts the tokens itself.
        mask: The 2-D mask that the model was given.
    """

    def __init__(self, model: Any, positions: Tensor | None, mask: Tensor | None) -> None:
        self.model, self.positions, self.mask = model, positions, mask

    @cached_property
    def sequences(self) -> Sequences | None:
        """The sequences in the rows; None if each row is one sequence, or if stock does not search for them."""
        return sequences_of(self.positions) if self.positions is not None and self.mask is None else None

    @cached_property
    def real(self) -> Tensor | None:
        """Which tokens are no padding, [B, T] bool; None if there is none. The host waits for it."""
        real = None if self.mask is None else self.mask.to(device=self.mask.device, dtype=torch.bool)
        return None if real is None or real.all() else real

    @cached_property
    def goes_in_rows(self) -> bool:
        """Whether all attention of the model is eager, and can compute some rows of queries at a time."""
        kinds: Any = ((module, stock_type(module)) for module in self.model.modules())
        modules = [module for module, kind in kinds if calls_interface(kind)]
        return bool(modules) and all(map(goes_in_rows, modules))

    @cached_property
    def is_compiled(self) -> bool:
        """Whether parts of the model are compiled: their graphs take stock's mask."""
        return any(map(_is_compiled, self.model.modules()))


# the forward in progress
_call: ContextVar[_Call | None] = ContextVar("call", default=None)


def packed_forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The forward that replaces the stock forward for a call whose masks need not be made; None for other calls.

    The other calls are those under no_grad or with a mask that is not 2-D, those of models that make their masks in
    another way, and those of models without windows if the rows are not packed, unless attention is eager. The host
    waits for positions where it does in stock, and for a 2-D mask.
    """
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if len(args) > 1 or not torch.is_grad_enabled() or transforms_or_export():
        return None
    if any(x is not None and (type(x) not in PLAIN_TENSORS or x.dim() != 2 or x.is_meta) for x in (positions, mask)):
        return None
    kind: Any = type(model)
    copy = _copy(kind)
    if copy is None or not copy.is_of(kind):
        return None
    if (positions is None or mask is not None) and not _has_windows(kind) and not _is_eager(model.config):
        return None
    return partial(_run, MethodType(copy.copy, model), _Call(model, positions, mask))


def _run(forward: Callable[..., Any], call: _Call, *args: Any, **kwargs: Any) -> Any:
    token = _call.set(call)
    try:
        return forward(*args, **kwargs)
    finally:
        _call.reset(token)


@cache
def _copy(stock_class: Any) -> GlobalsCopy | None:
    """A copy of the class's forward that finds our makers of masks; None if there is nothing for them to do."""
    found = {name: read_global(stock_class, name) for name in _MAKERS}
    stocks: dict[str, Any] = {name: f for name, f in found.items() if f and f is getattr(masking_utils, name, None)}
    if not stocks.keys() - {"create_bidirectional_mask"}:
        return None
    return copy_of_forward(stock_class, {name: _maker(f, *_MAKERS[name]) for name, f in stocks.items()})


@cache
def _has_windows(stock_class: Any) -> bool:
    """Whether the class's forward makes masks of windows or chunks."""
    return any(field and read_global(stock_class, name) for name, (field, _) in _MAKERS.items())


def _is_compiled(module: Any) -> bool:
    if "_orig_mod" in module._modules:
        return True
    call = module.__dict__.get("_compiled_call_impl")
    while isinstance(call, partial):
        # `memory_report` watches this call
        call = call.args[-1]
    return call is not None and getattr(call, "__func__", None) is not nn.Module._call_impl


def _maker(stock: Callable[..., Any], field: str | None, causal: bool) -> Callable[..., Any]:
    """A function that makes stock's mask, without memory of its own where attention does not need its values."""
    names = tuple(inspect.signature(stock).parameters)

    def make(*args: Any, **kwargs: Any) -> Any:
        call = _call.get()
        # keywords that only a decorator of the function knows go to it as they are
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if call is None or not _is_plain(given, call, causal) or call.is_compiled:
            return stock(*args, **kwargs)
        embeds, reach = given["inputs_embeds"], getattr(given["config"], field, None) if field else None
        if field and not reach:
            return stock(*args, **kwargs)
        eager = _is_eager(given["config"])
        # stock looks for sequences in what this function is given: gpt-oss hands it no positions
        packed = call.sequences if causal and given.get("position_ids") is not None else None
        found = _seen(embeds, call, packed, reach, causal, field == "attention_chunk_size", eager)
        if found is None or embeds.shape[:2] != (found[0].rows, found[0].tokens):
            return stock(*args, **kwargs)
        sequences, window, real = found
        # only shape, dtype and device of the embeddings are read
        like = embeds.new_empty(()).expand(embeds.shape)
        make_stocks = partial(stock, **{**given, "inputs_embeds": like})
        real = None if real is None else real.to(like.device)
        return PackedMask(sequences, window, make_stocks, embeds.device, real, embeds.dtype if eager else torch.bool)

    return make


def _seen(
    embeds: Tensor, call: _Call, packed: Sequences | None, reach: int | None, causal: bool, chunked: bool, eager: bool
) -> tuple[Sequences | Band, int | None, Tensor | None] | None:
    """Which tokens see which, the window, and which tokens are no padding; None where stock's mask is made."""
    rows, tokens = embeds.shape[:2]
    small = tokens**2 < SMALLEST_MASK
    if packed is not None:
        return None if chunked or (small and eager) else (packed, reach, None)
    if small:
        return None
    if call.real is not None:
        fits = call.real.shape == (rows, tokens)
        return (Band(rows, tokens, causal, chunked), _window(reach, causal), call.real) if fits else None
    whole = Sequences(rows, tokens, tuple(range(0, rows * tokens + 1, tokens)))
    if not reach or tokens < reach:
        # stock makes such a mask for eager attention alone
        return (whole, None, None) if eager else None
    if not causal:
        return Band(rows, tokens, causal), _window(reach, causal), None
    return (whole.cut(reach), None, None) if chunked else (whole, reach, None)


def _window(reach: int | None, causal: bool) -> int | None:
    """How many keys a query sees to one side, itself included, computed from the config's number."""
    return reach if causal or reach is None else reach + 1


def _is_plain(given: dict[str, Any], call: _Call, causal: bool) -> bool:
    """Whether the mask depends on positions and padding alone."""
    if is_compiling() or given.get("attention_mask") is not call.mask:
        return False
    positions = given.get("position_ids")
    if causal and call.positions is not None and positions is not None and positions is not call.positions:
        return False
    past = cache_in(given.values())
    if any(value is not None and value is not past for name, value in given.items() if name not in _KNOWN):
        return False
    if past is not None and (call.sequences is not None or type(past) is not DynamicCache or past.get_seq_length()):
        # stock does not look for sequences if there is a cache
        return False
    config = given["config"]
    if causal and getattr(config, "is_causal", True) is False:
        return False
    return bool(config._attn_implementation == "sdpa" or (causal and _is_eager(config) and call.goes_in_rows))


def _is_eager(config: Any) -> bool:
    return bool(config._attn_implementation == "eager")
