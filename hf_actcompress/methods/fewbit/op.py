"""Pointwise activations that keep their derivative in a few bits per element, and neither input nor output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...dispatch import implementation
from ...errors import UnknownOptionError
from ...ops.first_order import once_differentiable
from ...records import applied, load, save, stored_exact
from .reference import TABLE_OPTIONS, fewbit_stored_bits


class ActivationFewbitFunction(torch.autograd.Function):
    """Variant "fewbit": keeps packed codes of f'(x)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stock: Callable[[Tensor], Tensor],
        kind: str,
        options: tuple[float, ...],
        bits: int,
        method: str,
    ) -> Tensor:
        y: Tensor = implementation("activation_fwd", x, kind)(x, stock, kind, options)
        codes, scale = implementation("fewbit_codes", x)(x, kind, options, bits, method)
        save(ctx, stored_exact(codes), stored_exact(scale) if scale is not None else None)
        ctx.table, ctx.x_dtype = (kind, options, bits, method), x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        codes, scale = load(ctx)
        dx = implementation("fewbit_bwd", dy)(dy, codes, scale, *ctx.table)
        return dx.to(ctx.x_dtype), None, None, None, None, None


def activation_fewbit(
    x: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...] = (),
    *,
    bits: int = 4,
    method: str = "values",
) -> Tensor:
    """A pointwise activation whose derivative is kept in a few bits. The forward is exact.

    Args:
        x: Pre-activation, any shape, floating point.
        stock: The stock forward; its values are returned unchanged.
        kind, options: The derivative, a row of ``reference.ACTIVATIONS``, and its constants.
        bits: 1 to 4 for "steps"; 2, 3, 4 or 8 for "values"; 2 for "relus".
        method: "steps" replaces f' by the nearest step function of x (few-bit backward); "values" rounds f'(x) itself,
            which is more accurate for 3 bits or more; "relus" is ReGELU2 and ReSiLU2, for gelu and silu.

    Returns:
        ``stock(x)``.

    Saves:
        ``bits / 8`` byte per element and 4 bytes; 1/8 byte for relu, relu6, leaky_relu and hardsigmoid, where that is
        exact; 4 bytes per row instead of per tensor for relu_squared. It does not depend on what the next layer keeps.

    Gradient:
        Approximate, deterministic. Relative L2 error of f' for x ~ N(0, 1), gelu and silu:
        steps 0.32 0.42 (1 bit), 0.14 0.15 (2), 0.086 0.10 (3), 0.042 0.049 (4);
        values 0.14 0.15 (2), 0.068 0.085 (3), 0.032 0.039 (4), 0.0021 0.0022 (8); relus 0.36 0.47.
        If stock's f' of any element is NaN (x is NaN; x is inf for gelu, silu and similar kinds), all of dx is NaN,
        because no code is left to mark that element. For relu_squared, only the element's row of dx is NaN.

    Raises:
        UnknownOptionError: No table for that combination, such as an elu whose alpha is not 1.

    Source:
        Few-Bit Backward (arXiv 2202.00441), Approx-BP (arXiv 2406.16282); all tables by recipes/fit_fewbit.py.
    """
    fewbit_stored_bits(kind, bits, method)
    if TABLE_OPTIONS.get(kind, options) != options:
        raise UnknownOptionError(f"constants of {kind!r} in few bits", options, [TABLE_OPTIONS[kind]])
    return applied(ActivationFewbitFunction, x, stock, kind, options, bits, method)
