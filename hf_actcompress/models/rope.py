"""Rotary embeddings inside of attention: the stock forward, which is made to find our function under its own name.

The forward of an attention module looks `apply_rotary_pos_emb` up among the globals of its modeling file. A patched one
runs a copy of that function over a copy of these globals with that one name exchanged; the file is not touched.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from functools import cache, wraps
from operator import is_not
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..modules.attention import AttentionMixin
from ..modules.base import keeps_for_backward
from ..reference import rope_fwd

NAME = "apply_rotary_pos_emb"
_PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
# of q and k, of cos and sin: the second pair is that of autocast
_DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)


class Rotary:
    """A stock forward, the function that it finds under the name, and a copy of the forward that finds ours.

    The copy sees the globals of the modeling file as they are when it is called: it is made again when somebody has
    exchanged one of those that it reads.
    """

    def __init__(self, stock: Any) -> None:
        self.stock = stock
        self.function: Callable[..., Any] = stock.__globals__[NAME]
        self._ours = _ours(self.function)
        self._names = tuple(_global_names(stock.__code__))
        self._made = self._make()

    def is_of(self, stock_class: Any) -> bool:
        """Whether nobody has exchanged the forward or the function since."""
        return stock_class.forward is self.stock and self.stock.__globals__.get(NAME) is self.function

    @property
    def copy(self) -> Callable[..., Any]:
        """The copy over the globals of now."""
        seen, copy = self._made
        if any(map(is_not, seen, self._seen())):
            self._made = _, copy = self._make()
        return copy

    def _seen(self) -> Iterator[Any]:
        return map(self.stock.__globals__.get, self._names)

    def _make(self) -> tuple[tuple[Any, ...], Callable[..., Any]]:
        stock, seen = self.stock, tuple(self._seen())
        namespace = {**stock.__globals__, NAME: self._ours}
        copy = FunctionType(stock.__code__, namespace, stock.__name__, stock.__defaults__, stock.__closure__)
        copy.__kwdefaults__ = stock.__kwdefaults__
        return seen, copy


def _global_names(code: CodeType) -> set[str]:
    """The names of globals that a function reads, those of the functions inside of it included."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return names.union(*(_global_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


class RotaryMixin(AttentionMixin):
    """An attention module whose rotary embeddings are ours where `why_stock` finds nothing against it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # a patched class, made by patching or by unpickling; no other name than forward, which could be a child's
        stock_class = cls.__dict__.get("stock_class")
        if stock_class is not None and calls_rope(stock_class) and why_stock(stock_class) is None:
            cls.forward = _forward(stock_class, Rotary(stock_class.forward))  # type: ignore[method-assign]


def _forward(stock_class: Any, rotary: Rotary) -> Callable[..., Any]:
    @wraps(rotary.stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ours = not torch.compiler.is_compiling() and torch.is_grad_enabled() and rotary.is_of(stock_class)
        return (rotary.copy if ours else stock_class.forward)(self, *args, **kwargs)

    return forward


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

    # when a file is loaded, whatever the default device and autocast are
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
