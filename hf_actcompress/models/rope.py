"""Rotary embeddings inside of attention: the stock forward finds our function under the name of stock's.

The forward of an attention module looks `apply_rotary_pos_emb` up among the globals of its modeling file. A patched one
runs a copy of that function over a copy of these globals with that one name exchanged; the file is not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .. import compilation, ops
from ..modules.attention import AttentionMixin
from ..modules.base import keeps_for_backward
from ..ops import traced_kernels
from ..reference import rope_fwd
from .function_copies import GlobalsCopy, copy_of_forward, read_global
from .probe import same_bits

NAME = "apply_rotary_pos_emb"
# dtypes of queries and keys, and of angles; the second pair is that under autocast
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")


class RotaryMixin(AttentionMixin):
    """An attention module whose rotary embeddings are ours if `why_stock` gives no reason against it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # a patched class, made by patching or by unpickling; only `forward` is set, as another name could be a child's
        stock_class = cls.__dict__.get("stock_class")
        if stock_class is None:
            return
        ours = calls_rope(stock_class) and why_stock(stock_class) is None
        copied = copy_of_forward(stock_class, {NAME: _ours(read_global(stock_class, NAME))}) if ours else None
        if copied is not None:
            cls.forward = _forward(stock_class, copied)  # type: ignore[method-assign]


def _forward(stock_class: Any, rotary: GlobalsCopy) -> Callable[..., Any]:
    @wraps(rotary.stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = not compilation.is_traced() or compilation.is_traced_plan()
        ours = wanted and torch.is_grad_enabled() and rotary.is_of(stock_class)
        return (rotary.copy if ours else stock_class.forward)(self, *args, **kwargs)

    return forward


def calls_rope(stock_class: Any) -> bool:
    """Whether the class's forward, under its decorators, names the function."""
    return read_global(stock_class, NAME) is not None


def why_stock(stock_class: Any) -> str | None:
    """Why the rotary embeddings of a class that calls the function stay stock's."""
    function = read_global(stock_class, NAME)
    if not isinstance(function, FunctionType) or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        return f"its {NAME} is no plain function of (q, k, cos, sin, unsqueeze_dim)"
    if not _is_rope(function):
        return f"its {NAME} is not that of Llama (found by a numeric probe)"
    copied = copy_of_forward(stock_class, {NAME: function})
    return None if copied is not None else "a decorator of its forward does not hold it where a copy could be put"


def _ours(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        wanted = cos.requires_grad or sin.requires_grad
        nodes = compilation.is_traced_plan() and not wanted
        turned = (
            traced_kernels.rope(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)) if nodes else None
        )
        if turned is not None:
            return turned
        if wanted or compilation.is_traced() or not keeps_for_backward(q, k, cos, sin):
            return stock(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]
        return ops.rope(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


@cache
@torch.no_grad()
def _is_rope(function: Callable[..., Any]) -> bool:
    """Whether values, dtypes and memory order are those of the reference, for heads before and after the tokens."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    # runs when a file is loaded, so it must not depend on the default device or on autocast
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for dtype, angles in _DTYPES:
            q, k = normal(2, 5, 6, 8).to(dtype), normal(2, 5, 3, 8).to(dtype)
            for batch in (1, 2):
                cos, sin = normal(batch, 5, 8).to(angles), normal(batch, 5, 8).to(angles)
                if not _same(function, q.transpose(1, 2), k.transpose(1, 2), cos, sin, 1):
                    return False
                if not _same(function, q, k, cos, sin, 2):
                    return False
    return True


def _same(function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    ours = [rope_fwd(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)) for x in (q, k)]
    try:
        stock = function(q, k, cos, sin, unsqueeze_dim)
    except Exception:
        return False
    if not isinstance(stock, tuple) or len(stock) != 2:
        return False
    return all(same_bits(a, b) and a.stride() == b.stride() for a, b in zip(ours, stock, strict=True))
