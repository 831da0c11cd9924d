"""Pointwise activations: f(x) rebuilt for backward, f'(x), and dy * f'(x). They compute in fp32 and round once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..reference.activation import LAPLACE, SELU
from .common import POINTWISE_LAUNCH, POINTWISE_TILE, cast, cdiv, divide, exp, expm1, log1p, on, sigmoid, tanh, traced
from .launch import CachedLaunches


@triton.jit
def _cdf(x):
    """The normal distribution's cumulative function."""
    return 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_inner(x, FAST: tl.constexpr):
    """The argument of the tanh in gelu's tanh form."""
    return tanh(0.7978845608028654 * (x + 0.044715 * x * x * x), FAST)


@triton.jit
def _tanh_softplus(x, FAST: tl.constexpr):
    """tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2); from 20 up it is 1 in fp32."""
    e = exp(tl.minimum(x, 20.0), FAST)
    n = e * (e + 2.0)
    return divide(n, n + 2.0, FAST)


@triton.jit
def _softplus(x, FAST: tl.constexpr):
    """log(1 + e^x) as torch computes it: x itself from 20 up."""
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p(exp(-tl.abs(x), FAST)))


@triton.jit
def value(x, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FAST: tl.constexpr):
    """f(x) for x in fp32."""
    if KIND == "gelu" or KIND == "gelu_erf":
        return x * _cdf(x)
    elif KIND == "gelu_tanh" or KIND == "gelu_new":
        return 0.5 * x * (1.0 + _tanh_inner(x, FAST))
    elif KIND == "gelu_clipped":
        y = x * _cdf(x)
        # on a GPU the maximum of NaN and a number is the number, so NaN is put back
        return tl.where(y == y, tl.minimum(tl.maximum(y, A), B), y)
    elif KIND == "silu":
        return x * sigmoid(x, FAST)
    elif KIND == "mish":
        return x * _tanh_softplus(x, FAST)
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, x)
    elif KIND == "relu_squared":
        return tl.where(x <= 0.0, 0.0, x * x)
    elif KIND == "relu6":
        return tl.where(x <= 0.0, 0.0, tl.where(x >= 6.0, 6.0, x))
    elif KIND == "leaky_relu":
        return tl.where(x > 0.0, x, x * A)
    elif KIND == "hardswish":
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * 0.16666666666666666
    elif KIND == "hardsigmoid":
        return divide(tl.where(x > -3.0, tl.where(x < 3.0, x + 3.0, tl.where(x == x, 6.0, x)), 0.0), 6.0, FAST)
    elif KIND == "elu":
        return tl.where(x <= 0.0, A * expm1(x), x)
    elif KIND == "selu":
        return B * tl.where(x <= 0.0, A * expm1(x), x)
    elif KIND == "softplus":
        z = x * A
        return tl.where(z > B, x, divide(tl.maximum(z, 0.0) + log1p(exp(-tl.abs(z), FAST)), A, FAST))
    elif KIND == "softsign":
        return divide(x, 1.0 + tl.abs(x), FAST)
    elif KIND == "sigmoid":
        return sigmoid(x, FAST)
    elif KIND == "tanh":
        return tanh(x, FAST)
    elif KIND == "quick_gelu":
        return x * sigmoid(1.702 * x, FAST)
    elif KIND == "laplace":
        return 0.5 * (1.0 + tl.math.erf(divide(x - A, B * 1.4142135623730951, FAST)))
    else:
        tl.static_assert(KIND == "sqrt_softplus")
        return tl.math.sqrt_rn(_softplus(x, FAST))


@triton.jit
def derivative(
    x, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FAST: tl.constexpr, DTYPE: tl.constexpr = tl.float32
):
    """f'(x) for x in fp32; at a kink, torch's value. DTYPE: the dtype in which a clipped value is compared."""
    if KIND == "gelu" or KIND == "gelu_erf" or KIND == "gelu_clipped":
        cdf = _cdf(x)
        slope = cdf + x * exp(-0.5 * x * x, FAST) * 0.3989422804014327
        if KIND == "gelu_clipped":
            y = cast(x * cdf, DTYPE).to(tl.float32)
            # a product instead of a selection, as in torch, so that inf gives NaN
            slope *= tl.where((y >= A) & (y <= B), 1.0, 0.0)
        return slope
    elif KIND == "gelu_tanh" or KIND == "gelu_new":
        t = _tanh_inner(x, FAST)
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (0.7978845608028654 * (1.0 + 0.134145 * x * x))
    elif KIND == "silu":
        s = sigmoid(x, FAST)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == "mish":
        t = _tanh_softplus(x, FAST)
        # 1 - t * t without subtracting two numbers near one: 1 - t is 2 / (n + 2)
        e = exp(tl.minimum(x, 20.0), FAST)
        rest = divide(2.0, e * (e + 2.0) + 2.0, FAST)
        slope = t + x * sigmoid(x, FAST) * (rest * (2.0 - rest))
        # torch computes inf * 0 there, which is NaN
        return tl.where(x == float("inf"), float("nan"), slope)
    elif KIND == "relu":
        return tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "relu_squared":
        return tl.where(x <= 0.0, 0.0, 2.0 * x)
    elif KIND == "relu6":
        return tl.where((x <= 0.0) | (x >= 6.0), 0.0, 1.0)
    elif KIND == "leaky_relu":
        return tl.where(x > 0.0, 1.0, A)
    elif KIND == "hardswish":
        return tl.where(x <= -3.0, 0.0, tl.where(x < 3.0, divide(x, 3.0, FAST) + 0.5, 1.0))
    elif KIND == "hardsigmoid":
        return tl.where((x > -3.0) & (x < 3.0), 0.16666666666666666, 0.0)
    elif KIND == "elu":
        return tl.where(x <= 0.0, A * exp(x, FAST), 1.0)
    elif KIND == "selu":
        return tl.where(x <= 0.0, A * B * exp(x, FAST), B)
    elif KIND == "softplus":
        z = x * A
        return tl.where(z > B, 1.0, sigmoid(z, FAST))
    elif KIND == "softsign":
        root = divide(1.0, 1.0 + tl.abs(x), FAST)
        return tl.where(root == 0.0, float("nan"), root * root)
    elif KIND == "sigmoid":
        s = sigmoid(x, FAST)
        return (1.0 - s) * s
    elif KIND == "tanh":
        e = exp(-2.0 * tl.abs(x), FAST)
        return divide(4.0 * e, (1.0 + e) * (1.0 + e), FAST)
    elif KIND == "quick_gelu":
        s = sigmoid(1.702 * x, FAST)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == "laplace":
        z = divide(x - A, B * 1.4142135623730951, FAST)
        return divide(exp(-z * z, FAST), B * 2.5066282746310002, FAST)
    else:
        tl.static_assert(KIND == "sqrt_softplus")
        e = exp(-tl.abs(x), FAST)
        root = tl.math.sqrt_rn(tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p(e)))
        return divide(tl.where(x > 0.0, 1.0, e), 2.0 * root * (1.0 + e), FAST)


@CachedLaunches
@triton.jit
def _activation_kernel(
    x_ptr, dy_ptr, out_ptr, count,
    WANT: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FAST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """WANT: "value", "derivative", or "dx" = dy * f'(x)."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    if WANT == "value":
        out = value(x, KIND, A, B, FAST)
    elif WANT == "derivative":
        out = derivative(x, KIND, A, B, FAST)
    else:
        dy = tl.load(dy_ptr + at, mask=at < count).to(tl.float32)
        out = dy * derivative(x, KIND, A, B, FAST, x_ptr.dtype.element_ty)
    tl.store(out_ptr + at, cast(out, out_ptr.dtype.element_ty), mask=at < count)


def constants(kind: str, options: tuple[float, ...] | list[float]) -> tuple[float, float]:
    """The two constants A and B that the kernels take."""
    low, high, *_ = (*{"laplace": LAPLACE, "selu": SELU}.get(kind, options), 0.0, 0.0)
    return low, high


def is_fast(*tensors: Tensor) -> bool:
    """Whether the results are of 16 bits, so that their rounding hides the errors of approximations."""
    return all(x.dtype.itemsize < 4 for x in tensors)


@traced(lambda x, dy, want, kind, options, dtype: x.new_empty(x.shape, dtype=dtype))
def _activation(x: Tensor, dy: Tensor | None, want: str, kind: str, options: list[float], dtype: torch.dtype) -> Tensor:
    out = x.new_empty(x.shape, dtype=dtype)
    if x.numel() == 0:
        return out
    x, dy = x.contiguous(), x if dy is None else dy.contiguous()
    low, high = constants(kind, options)
    with on(x):
        _activation_kernel[(cdiv(x.numel(), POINTWISE_TILE),)](
            x, dy, out, x.numel(), WANT=want, KIND=kind, A=low, B=high, FAST=is_fast(out), **POINTWISE_LAUNCH,
        )  # fmt: skip
    return out


def activation_value(
    x: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """f(x) in `dtype`, from the formula of that kind. It rounds once, where stock rounds after each of its ops."""
    return _activation(x, None, "value", kind, list(options), dtype)


def activation_bwd(dy: Tensor, x: Tensor, kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """dx = dy * f'(x), in x's dtype."""
    return _activation(x, dy, "dx", kind, list(options), x.dtype)


def activation_derivative(x: Tensor, kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """f'(x), in x's dtype."""
    return _activation(x, None, "derivative", kind, list(options), x.dtype)


# kind -> options. The bounds are numbers that every dtype has, because torch compares in the tensor's dtype
OPTIONS = {"gelu_clipped": (-0.125, 2.0), "leaky_relu": (0.01,), "elu": (1.0,), "softplus": (1.0, 20.0)}
# kind -> a stock forward: torch's own function if there is one, or transformers' composition
STOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_erf": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu_new": lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "gelu_clipped": lambda x: torch.clip(functional.gelu(x), *OPTIONS["gelu_clipped"]),
    "silu": functional.silu,
    "mish": functional.mish,
    "relu": functional.relu,
    "relu_squared": lambda x: torch.square(functional.relu(x)),
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "elu": functional.elu,
    "selu": functional.selu,
    "softplus": functional.softplus,
    "softsign": functional.softsign,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "laplace": lambda x: 0.5 * (1.0 + torch.erf((x - 0.707107).div(0.282095 * math.sqrt(2.0)))),
    "sqrt_softplus": lambda x: functional.softplus(x).sqrt(),
}


def inputs(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Tensor:
    """Inputs [rows, width] for an activation; they include the kinks, which are numbers that every dtype has."""
    x = 3.0 * torch.randn(rows, width, device=device)
    count = min(x.numel(), 5)
    x.view(-1)[:count] = torch.tensor([-3.0, 0.0, 3.0, 6.0, 20.0], device=device)[:count]
    return x.to(dtype)


def _sample_value(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((inputs(*sizes), STOCKS[kind], kind, OPTIONS.get(kind, ()), sizes[1]) for kind in STOCKS)


def _sample_derivative(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((inputs(*sizes), kind, OPTIONS.get(kind, ())) for kind in STOCKS)


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for x, *row in _sample_derivative(*sizes):
        yield torch.randn(x.shape, device=x.device).to(x.dtype), x, *row


SAMPLES = {
    "activation_bwd": _sample_bwd,
    "activation_derivative": _sample_derivative,
    "activation_value": _sample_value,
}
