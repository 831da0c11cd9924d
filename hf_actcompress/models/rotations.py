"""Rotary embeddings unlike Llama's: they rotate a part of each head, round differently, or take one tensor at a time.

Their own code runs. If a norm has made the queries and keys, the rotated ones are not kept: attention rebuilds them
from what the norm keeps. A probe shows that a function rotates one tensor as it rotates two, and that the gradient
depends on the angles alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .. import compilation, ops
from ..modules.base import keeps_for_backward
from .function_copies import read_global
from .probe import same_bits

_NAMES = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_vision")
_PAIR = ("q", "k", "cos", "sin")
_ONE = ("x", "cos", "sin", "unsqueeze_dim")
# dtypes of queries and keys, and of angles; the second pair is that under autocast
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
)
_Rotation = Callable[..., Any]


def rotation_of(stock_class: Any) -> tuple[str, _Rotation] | None:
    """The name by which a class's forward calls such a function, and the function that it is to find there instead.

    None if the forward's code has no norm, or no function of that kind.
    """
    code = getattr(inspect.unwrap(stock_class.forward), "__code__", None)
    if code is None or not any("norm" in name for name in code.co_names):
        return None
    for name in _NAMES:
        function = read_global(stock_class, name)
        if isinstance(function, FunctionType) and is_rotation(function):
            return name, _two(function) if _takes_two(function) else _one(function)
    return None


def _takes_two(function: _Rotation) -> bool:
    return tuple(inspect.signature(function).parameters)[:4] == _PAIR


def _two(stock: _Rotation) -> _Rotation:
    """The function, which keeps neither of its two results if norms have made both q and k."""

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *dim: Any, **named: Any) -> Any:
        if not (_ours(q, cos, sin) and _ours(k, cos, sin)):
            return stock(q, k, cos, sin, *dim, **named)
        first = partial(_first, stock, dim, named)
        return ops.rotated(q, first, cos, sin), ops.rotated(k, first, cos, sin)

    return rotate


def _one(stock: _Rotation) -> _Rotation:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor, *dim: Any, **named: Any) -> Any:
        if not _ours(x, cos, sin):
            return stock(x, cos, sin, *dim, **named)
        return ops.rotated(x, partial(_alone, stock, dim, named), cos, sin)

    return rotate


def _ours(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    if compilation.is_traced() or cos.requires_grad or sin.requires_grad:
        return False
    return keeps_for_backward(x, cos, sin) and ops.rotates_normed(x)


def _first(
    stock: _Rotation, dim: tuple[Any, ...], named: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """x, rotated as the queries; one head of x is passed as the keys."""
    heads = dim[0] if dim else named.get("unsqueeze_dim", 1 if x.dim() == 4 else -2)
    rotated: Tensor = stock(x, x.narrow(heads, 0, 1), cos, sin, *dim, **named)[0]
    return rotated


def _alone(
    stock: _Rotation, dim: tuple[Any, ...], named: dict[str, Any], x: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    rotated: Tensor = stock(x, cos, sin, *dim, **named)
    return rotated


@cache
def is_rotation(function: _Rotation) -> bool:
    """Whether a function rotates each tensor independently, with a gradient that does not depend on the values."""
    names = tuple(inspect.signature(function).parameters)
    if names not in (_PAIR, (*_PAIR, "unsqueeze_dim"), _ONE):
        return False
    # [B, H, S, D] with heads in the second place, or [B, S, H, D]; of images [S, H, D]
    places: tuple[tuple[int, ...], ...] = ((1,), (2,)) if "unsqueeze_dim" in names else ((),)
    cases = [(dtype, angles, dims) for dtype, angles in DTYPES for dims in places]
    with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        # angles of all numbers of a head, and of half of them, which not every function takes
        return all(_tried(function, 8, *case) is True and _tried(function, 4, *case) is not False for case in cases)


def _tried(
    function: _Rotation, width: int, dtype: torch.dtype, angles: torch.dtype, dims: tuple[int, ...]
) -> bool | None:
    """Whether the function is such a rotation for angles of that width; None if it does not take them."""
    normal = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    batch = (2,) if dims else ()
    shape = (*batch, 3, 5, 8) if dims == (1,) else (*batch, 5, 3, 8)
    x = [normal(shape).to(dtype).requires_grad_() for _ in range(3)]
    cos, sin = (normal(*batch, 5, width).to(angles) for _ in range(2))
    try:
        return _rotates(function, x, cos, sin, dims, normal(shape))
    except Exception:
        return None


def _rotates(function: _Rotation, x: list[Tensor], cos: Tensor, sin: Tensor, dims: tuple[int, ...], dy: Tensor) -> bool:
    """Compare two tensors rotated at once with each rotated alone, and the gradients for two different tensors."""
    q, k, other = x
    kept = q.detach().clone(), k.detach().clone()
    one = partial(_first if _takes_two(function) else _alone, function, dims, {})
    found = one(q, cos, sin), one(k, cos, sin)
    expected = function(q, k, cos, sin, *dims) if _takes_two(function) else found
    if not all(map(same_bits, found, expected)) or not all(map(same_bits, kept, (q.detach(), k.detach()))):
        return False
    if any(y._base is not None or y.stride() != z.stride() for y, z in zip(found, expected, strict=True)):
        return False
    gradients = [torch.autograd.grad(one(t, cos, sin), t, dy.to(found[0].dtype))[0] for t in (q, other)]
    return same_bits(*gradients)
