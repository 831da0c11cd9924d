"""Pointwise activations that keep their input; the output is derived from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import (
    Derived,
    Stored,
    applied,
    declare,
    is_lossless,
    load,
    record_of,
    save,
    stored_exact,
)
from ..reference.bits import pack_mask, unpack_mask
from .autocast import SameAutocast
from .first_order import once_differentiable

# kinds whose derivative changes between its two values where x changes sign: a codec must not round x across zero
SIGN_DECIDES = ("relu", "relu6", "leaky_relu")
# those of them whose derivative depends on nothing but the sign
_BY_MASK = ("relu", "leaky_relu")


def _rebuild(x: Tensor, *, stock: SameAutocast, kind: str, options: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    y: Tensor = implementation("activation_value", x, kind)(x, stock, kind, options, dtype)
    return y


def itself(y: Tensor) -> Tensor:
    """Recompute function of an output that is kept."""
    return y


class ActivationFunction(torch.autograd.Function):
    """Variant "input": keeps x, rebuilds y."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...], codec: Codec
    ) -> Tensor:
        y: Tensor = implementation("activation_fwd", x, kind)(x, stock, kind, options)
        record = record_of(x, codec.keeping_sign() if kind in SIGN_DECIDES else codec)
        again = SameAutocast(stock, x)
        rebuild: Callable[..., Tensor] = partial(_rebuild, stock=again, kind=kind, options=options, dtype=y.dtype)
        if kind == "relu" and codec == IDENTITY and isinstance(record, Stored):
            # f' can be computed from the output, too, and a stock layer that follows keeps the output anyway
            record, rebuild = stored_exact(y.detach()), itself
        # if x is derived from a rounded tensor, such as a BatchNorm's input, the rebuilt x may have a wrong sign
        rounded = kind in _BY_MASK and isinstance(record, Derived) and not is_lossless(record)
        save(ctx, stored_exact(pack_mask(x > 0)) if rounded else record)
        declare(y, rebuild, record)
        ctx.kind, ctx.options, ctx.by_mask = kind, options, rounded
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (x,) = load(ctx, dy)
        if ctx.by_mask:
            # any number with x's sign gives the same f'
            x = unpack_mask(x, dy.shape).to(dy.dtype).sub_(0.5)
        bwd = implementation("activation_bwd", dy, ctx.kind)
        return bwd(dy, x, ctx.kind, ctx.options), None, None, None, None


def activation(
    x: Tensor,
    stock: Callable[[Tensor], Tensor],
    kind: str,
    options: tuple[float, ...] = (),
    *,
    codec: Codec = IDENTITY,
) -> Tensor:
    """A pointwise activation that keeps its input alone.

    Args:
        x: Pre-activation, any shape, floating point.
        stock: The stock forward; its values are returned unchanged. They are rebuilt by it, or by a kernel for `kind`.
        kind: A row of ``reference.ACTIVATIONS``: the derivative.
        options: Constants of that row.
        codec: How x is stored if it has to be.

    Returns:
        ``stock(x)``.

    Saves:
        x by its record. In stock, compositions such as ``gelu_new`` keep four tensors; this op keeps one. With the
        identity codec, a relu whose x is not derived keeps its output instead, as stock does. If x is derived from a
        tensor that a lossy codec stored (after a BatchNorm), a relu and a leaky_relu keep one more bit per element,
        because rounding loses the sign.

    Gradient:
        Exact. Bit-equal to stock where torch has one kernel for it (gelu, silu, relu, mish, ...); for compositions the
        derivative is computed in fp32 and rounded once.
    """
    return applied(ActivationFunction, x, stock, kind, options, codec)
