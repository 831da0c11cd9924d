"""Derivatives of the pointwise activations. Forward and rebuild use the stock module's own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten
# the overload itself, because looking it up costs as much host time as the rest of the call
_tanh_backward: Any = aten.tanh_backward.grad_input
# of `gelu_new`: 0.5 x (1 + tanh(_SCALE (x + _CUBIC x^3)))
_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715

# alpha and scale, as torch has them; mean and deviation
SELU, LAPLACE = (1.6732632423543772848170429916717, 1.0507009873554804934193349852946), (0.707107, 0.282095)

# kind -> a kind that is the same function with other roundings, whose fitted tables it uses
SAME_FUNCTION = {"gelu_erf": "gelu", "gelu_new": "gelu_tanh"}


def activation_value(
    x: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    """y again, from x, by stock's code and so in y's `dtype`. A kernel uses formula `kind` with `options` instead."""
    return stock(x)


def activation_bwd(dy: Tensor, x: Tensor, kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """dx = dy * f'(x), in x's dtype; `kind` is a row of `ACTIVATIONS`, `options` its constants (bounds, slope)."""
    own = x.dtype
    if dy.dtype != own:
        dtype = torch.promote_types(dy.dtype, own)
        dy, x = dy.to(dtype), x.to(dtype)
    dx: Tensor = ACTIVATIONS[kind](dy, x, *options)
    return dx if dx.dtype == own else dx.to(own)


def _gelu_tanh(dy: Tensor, x: Tensor) -> Any:
    return aten.gelu_backward.default(dy, x, approximate="tanh")


def _gelu_clipped(dy: Tensor, x: Tensor, low: float, high: float) -> Any:
    y = torch.nn.functional.gelu(x)
    return aten.gelu_backward(dy * ((y >= low) & (y <= high)), x)


def _in_fp32(derivative: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """For functions composed of several ops: f' in fp32, rounded once; stock's composition is less accurate."""

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return dy.to(wide).mul_(derivative(x.to(wide))) if dy.dtype != wide else dy * derivative(x)

    return backward


def _quick_gelu(x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return s * (1 + 1.702 * x * (1 - s))


def _laplace(x: Tensor) -> Tensor:
    mu, sigma = LAPLACE
    z = (x - mu) / (sigma * math.sqrt(2.0))
    return torch.exp(-z * z) / (sigma * math.sqrt(2.0 * math.pi))


def _softsign(x: Tensor) -> Tensor:
    root = (x.abs() + 1).reciprocal()
    # as in stock, where f' of inf is inf * 0, which is NaN
    return torch.where(root == 0, torch.nan, root * root)


def _gelu_erf(x: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
    return cdf + x * torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def gelu_new_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(t, 0.5 (1 + t)), where t is the tanh in ``gelu_new``. x times the second has the bits of stock's composition."""
    t = torch.tanh(_SCALE * (x + _CUBIC * torch.pow(x, 3.0)))
    return t, torch.rsub(t, 0.5, alpha=-0.5)


def gelu_new_bwd(dy: Tensor, x: Tensor, t: Tensor, half: Tensor) -> Tensor:
    """dx, written over the results of `gelu_new_parts`. At most five tensors of x's size exist at the same time."""
    inner = x.square().mul_(1.5 * _CUBIC * _SCALE).add_(0.5 * _SCALE)
    slope = _tanh_backward(x, t, grad_input=t)
    return half.addcmul_(slope, inner).mul_(dy)


def _gelu_new(dy: Tensor, x: Tensor) -> Any:
    """dx where stock composes the tanh form. In fp32, torch's kernel would have 1.1 to 1.3 times its error."""
    if x.dtype.itemsize < 4:
        return _gelu_tanh(dy, x)
    return gelu_new_bwd(dy, x, *gelu_new_parts(x))


def _sqrt_softplus(dy: Tensor, x: Tensor) -> Any:
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    root = torch.nn.functional.softplus(x).sqrt()
    return aten.softplus_backward(dy.to(wide) / (2 * root), x, 1.0, 20.0)


ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": aten.gelu_backward.default,
    "gelu_erf": _in_fp32(_gelu_erf),
    "gelu_tanh": _gelu_tanh,
    "gelu_new": _gelu_new,
    "gelu_clipped": _gelu_clipped,
    "silu": aten.silu_backward.default,
    "mish": aten.mish_backward,
    "relu": lambda dy, x: aten.threshold_backward(dy, x, 0),
    "relu_squared": lambda dy, x: dy * (2.0 * torch.relu(x)),
    "relu6": lambda dy, x: aten.hardtanh_backward(dy, x, 0.0, 6.0),
    "leaky_relu": lambda dy, x, slope: aten.leaky_relu_backward(dy, x, slope, False),
    "hardswish": aten.hardswish_backward,
    "hardsigmoid": aten.hardsigmoid_backward,
    "elu": lambda dy, x, alpha: aten.elu_backward(dy, alpha, 1.0, 1.0, False, x),
    "selu": lambda dy, x: aten.elu_backward(dy, *SELU, 1.0, False, x),
    "softplus": aten.softplus_backward,
    "softsign": _in_fp32(_softsign),
    "sigmoid": lambda dy, x: aten.sigmoid_backward(dy, torch.sigmoid(x)),
    "tanh": lambda dy, x: aten.tanh_backward(dy, torch.tanh(x)),
    "quick_gelu": _in_fp32(_quick_gelu),
    "laplace": _in_fp32(_laplace),
    "sqrt_softplus": _sqrt_softplus,
}
