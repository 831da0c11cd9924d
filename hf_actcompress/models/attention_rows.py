"""Eager attention for some rows of queries at a time: the stock forward runs, but finds our function.

The forward of an attention module looks `eager_attention_forward` up among the globals of its modeling file: Gemma 2's
has a softcap, gpt-oss's has sinks. A patched module runs a copy of that forward (function_copies.py). That copy finds
our function, which calls the file's own one for some queries at a time, with all keys and values, in forward and again
in backward. So the probabilities are not kept, and a mask need not be made (see packed_masks.py). Calls with dropout,
and those whose probabilities a hook reads, are stock's.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import ops
from ..codecs import IDENTITY
from ..modules.base import has_hooks, is_sharded, keeps_for_backward, recording, settings_of, stock_type
from ..private_apis import without_dispatch_modes
from ..roles import Role
from .eager_attention import eager_function_of
from .function_copies import GlobalsCopy, copy_of_forward, names_read_by, read_global
from .probe import undisturbed

NAME = "eager_attention_forward"
_Eager = Callable[..., tuple[Tensor, Tensor | None]]
# sizes of a probe's attention: tokens, tokens in one block, width of a head
_TOKENS, _ROWS, _WIDTH = 7, 3, 16


def calls_interface(stock_class: Any) -> bool:
    """Whether the class's forward asks transformers' attention interface for a function."""
    return "ALL_ATTENTION_FUNCTIONS" in names_read_by(stock_class.forward)


@cache
def copy_in_rows(stock_class: Any) -> GlobalsCopy | None:
    """A copy of the class's forward that finds our function; None if the forward looks for no such function."""
    function = eager_function_of(stock_class)
    if not isinstance(function, FunctionType) or not calls_interface(stock_class):
        return None
    return copy_of_forward(stock_class, {NAME: _ours(function)}) if read_global(stock_class, NAME) is function else None


def goes_in_rows(module: Any) -> bool:
    """Whether a module's attention is computed for some rows of queries at a time if its mask need not be made."""
    settings, kind = settings_of(module), cast(Any, stock_type(module))
    found = copy_in_rows(kind)
    if settings is None or settings.role != Role.IN_PARTS or found is None or not found.is_of(kind):
        return False
    # a hook may ask for the probabilities
    plain = not has_hooks(module) and not is_sharded(module) and not getattr(module, "attention_dropout", 1)
    return plain and _has_apart_rows(module)


def _ours(stock: _Eager) -> _Eager:
    def eager_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        read = _read(stock, kwargs)
        if read is None or kwargs.get("dropout") or not _in_rows(module, query, key, value, attention_mask):
            mask = attention_mask.values() if isinstance(attention_mask, ops.PackedMask) else attention_mask
            return stock(module, query, key, value, mask, **kwargs)
        settings = settings_of(module)
        of_module = partial(partial, _of_rows, stock, read)
        own = ops.Snapshot(module, of_module, weights="own")
        codec = IDENTITY if settings is None else settings.codec
        return ops.attention_rows(of_module(module), attention_mask, query, key, value, own, codec=codec), None

    return eager_attention_forward


def _in_rows(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a call is computed in rows: where the mask has no memory, and where stock would keep probabilities for
    backward."""
    weights = [w for w in module._parameters.values() if w is not None]
    if isinstance(mask, ops.PackedMask):
        shape = mask.shape[0], mask.shape[-1]
        fits = all((x.size(0), x.size(2)) == shape for x in (q, k, v))
        return fits and (not torch.is_grad_enabled() or recording(q, k, v, *weights))
    plain = mask is None or (not mask.requires_grad and mask.dim() == 4 and mask.size(2) in (1, q.size(2)))
    return plain and keeps_for_backward(q, k, v, *weights) and goes_in_rows(module)


def _of_rows(
    stock: _Eager, kwargs: dict[str, Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    return stock(module, q, k, v, mask, **kwargs)[0]


def _read(stock: _Eager, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords that the function reads; None if one of them is a tensor.

    Layers pass positions and sinks to all of these functions, but most functions read neither.
    """
    named, reads_others = _parameters(stock)
    read = {name: x for name, x in kwargs.items() if reads_others or name in named}
    return None if any(isinstance(x, Tensor) for x in read.values()) else read


@cache
def _parameters(stock: _Eager) -> tuple[frozenset[str], bool]:
    """The names of the function's parameters, and whether it reads keywords for which it has no parameter."""
    parameters = inspect.signature(stock).parameters
    others = next((p.name for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    return frozenset(parameters), any(step.argval == others for step in dis.get_instructions(stock))


# by class, because a config's other values only decide about sizes and constants
_apart: dict[type, bool] = {}


def _has_apart_rows(module: Any) -> bool:
    """Whether a row of queries gets the same output among some rows as among all; tried on a small example."""
    kind = stock_type(module)
    if kind not in _apart:
        try:
            with torch.device("cpu"), without_dispatch_modes():
                _apart[kind] = _are_apart(module, eager_function_of(kind))
        except Exception:
            _apart[kind] = False
    return _apart[kind]


def _are_apart(module: Any, stock: _Eager | None) -> bool:
    heads, groups = module.config.num_attention_heads, getattr(module, "num_key_value_groups", 1)
    assert stock is not None
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    probe = copy.copy(module)
    probe._parameters = {name: None if p is None else normal(p.shape) for name, p in module._parameters.items()}
    q = normal(2, heads, _TOKENS, _WIDTH)
    k, v = (normal(2, heads // groups, _TOKENS, _WIDTH) for _ in range(2))
    mask = torch.where(normal(2, 1, _TOKENS, _TOKENS) > 0, 0.0, torch.finfo(torch.float32).min)
    blocks = (slice(start, start + _ROWS) for start in range(0, _TOKENS, _ROWS))
    with undisturbed():
        whole = stock(probe, q, k, v, mask, scaling=0.25, dropout=0.0)[0]
        parts = [stock(probe, q[:, :, i], k, v, mask[:, :, i], scaling=0.25, dropout=0.0)[0] for i in blocks]
    return bool(torch.allclose(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6))
