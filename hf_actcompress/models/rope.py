"""Rotary embeddings inside of attention: the stock forward finds our function under the name of stock's.

The forward of an attention module looks `apply_rotary_pos_emb` up among the globals of its modeling file. A patched one
runs a copy of that function over a copy of these globals with that one name exchanged; the file is not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..modules.attention import AttentionMixin
from ..modules.base import keeps_for_backward
from ..reference import rope_fwd
from .function_copies import GlobalsCopy
from .rotations import rotation_of

NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
# dtypes of q and k, and of cos and sin; the second pair is that under autocast
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


class RotaryMixin(AttentionMixin):
    """An attention module whose rotary embeddings are ours if `why_stock` gives no reason against it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # a patched class, made by patching or by unpickling; only `forward` is set, as another name could be a child's
        stock_class = cls.__dict__.get("stock_class")
        if stock_class is None:
            return
        if calls_rope(stock_class) and why_stock(stock_class) is None:
            cls.forward = _forward(stock_class, rotary_copy(stock_class.forward))  # type: ignore[method-assign]
        elif (found := rotation_of(stock_class)) is not None:
            cls.forward = _forward(stock_class, GlobalsCopy(stock_class.forward, dict([found])))  # type: ignore[method-assign]


def _forward(stock_class: Any, rotary: GlobalsCopy) -> Callable[..., Any]:
    @wraps(rotary.stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = not torch.compiler.is_compiling() and torch.is_grad_enabled() and rotary.is_of(stock_class)
        return (rotary.copy if ours else stock_class.forward)(self, *args, **kwargs)

    return forward


def rotary_copy(forward: Any) -> GlobalsCopy:
    """The copy of a plain forward that finds our rotary embeddings."""
    return GlobalsCopy(forward, {NAME: _ours(forward.__globals__[NAME])})


def calls_rope(stock_class: Any) -> bool:
    """Whether the class's forward, under its decorators, names the function."""
    code = getattr(inspect.unwrap(stock_class.forward), "__code__", None)
    return code is not None and NAME in code.co_names


def why_stock(stock_class: Any) -> str | None:
    """Why the rotary embeddings of a class that calls the function stay stock's."""
    forward = stock_class.forward
    plain = isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")
    if not plain or NAME not in forward.__code__.co_names:
        return "its forward is decorated"
    function = forward.__globals__.get(NAME)
    if not isinstance(function, FunctionType) or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        return f"its {NAME} is no plain function of (q, k, cos, sin, unsqueeze_dim)"
    return None if _is_rope(function) else f"its {NAME} is not that of Llama (found by a numeric probe)"


def _ours(stock: Callable[..., Any]) -> Callable[..., Any]:
    def apply_rotary_pos_emb(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        wanted = cos.requires_grad or sin.requires_grad
        if wanted or torch.compiler.is_compiling() or not keeps_for_backward(q, k, cos, sin):
            return stock(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]
        return ops.rope(q, k, cos, sin, unsqueeze_dim)

    return apply_rotary_pos_emb


@cache
@torch.no_grad()
def _is_rope(function: Callable[..., Any]) -> bool:
    """Whether values, dtypes and memory order are those of the reference, for heads before and after the tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    # runs when a file is loaded, so it must not depend on the default device or on autocast
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        for dtype, angles in _DTYPES:
            q, k = normal(2, 5, 6, 8, dtype=dtype), normal(2, 5, 3, 8, dtype=dtype)
            for batch in (1, 2):
                cos, sin = normal(batch, 5, 8, dtype=angles), normal(batch, 5, 8, dtype=angles)
                if not _same(function, q.transpose(1, 2), k.transpose(1, 2), cos, sin, 1):
                    return False
                if not _same(function, q, k, cos, sin, 2):
                    return False
    return True


def _same(function: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    ours = [rope_fwd(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)) for x in (q, k)]
    try:
        stock = function(q, k, cos, sin, unsqueeze_dim)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return False
    if not isinstance(stock, tuple) or len(stock) != 2:
        return False
    pairs = zip(ours, stock, strict=True)
    return all(a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b) for a, b in pairs)
