"""The product of a gated MLP, act(gate) * up: keeps gate and up, and neither act(gate) nor the product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import applied, declare, load, record_of, save
from ._activation import SIGN_DECIDES
from .autocast import SameAutocast
from .first_order import once_differentiable

_Stock = Callable[[Tensor], Tensor]


def _rebuild(
    gate: Tensor, up: Tensor, *, stock: SameAutocast, kind: str, options: tuple[float, ...], dtype: torch.dtype
) -> Tensor:
    h: Tensor = implementation("gated_product", gate, kind)(gate, up, stock, kind, options, dtype)
    return h


class GatedProductFunction(torch.autograd.Function):
    """Variant "gate_up": keeps gate and up, rebuilds the rest."""

    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, stock: _Stock, kind: str, options: tuple[float, ...], codec: Codec
    ) -> Tensor:  # gate, up [..., F]
        h: Tensor = implementation("gated_product_fwd", gate, kind)(gate, up, stock, kind, options)
        of_gate = codec.part("gate")
        of_gate = of_gate.keeping_sign() if kind in SIGN_DECIDES else of_gate
        gate_record, up_record = record_of(gate, of_gate), record_of(up, codec.part("up"))
        save(ctx, gate_record, up_record)
        ctx.stock, ctx.kind, ctx.options = SameAutocast(stock, gate), kind, options
        rebuild = partial(_rebuild, stock=ctx.stock, kind=kind, options=options, dtype=h.dtype)
        declare(h, rebuild, gate_record, up_record)
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        gate, up = load(ctx, dh)
        bwd = implementation("gated_product_bwd", dh, ctx.kind)
        dgate, dup = bwd(dh, gate, up, ctx.stock, ctx.kind, ctx.options)
        return dgate, dup, None, None, None, None


def gated_product(
    gate: Tensor,
    up: Tensor,
    stock: _Stock,
    kind: str,
    options: tuple[float, ...] = (),
    *,
    codec: Codec = IDENTITY,
) -> Tensor:
    """``stock(gate) * up`` for SwiGLU, GeGLU and similar MLPs.

    Args:
        gate, up: ``[..., F]``, floating point.
        stock: The stock activation, applied to gate.
        kind, options: A row of ``reference.ACTIVATIONS``, which says act's derivative, and its constants.
        codec: How gate and up are stored.

    Returns:
        The product, ``[..., F]``.

    Saves:
        gate and up (stock: also act(gate) and, in the next linear, the product).

    Gradient:
        Exact: bit-equal to stock by the reference where the activation's is, within stock's own error by a kernel.
    """
    return applied(GatedProductFunction, gate, up, stock, kind, options, codec)
