"""Contract cases of the experts' op and of functions that run again."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers.integrations import moe

from hf_actcompress import ops
from hf_actcompress.models.grouped_products import GROUPED_PRODUCTS
from tests.ops.contract_case import Case, Inputs, rand, size

EXPERTS = 3


def _order(h: Tensor) -> tuple[Tensor, Tensor]:
    """The expert of each row in ascending order, and where each expert's rows end. The last expert gets no row."""
    experts = torch.arange(h.size(0)) * (EXPERTS - 1) // max(h.size(0), 1)
    return experts, torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()


def _mixed(y: Tensor, h: Tensor) -> Tensor:
    """Casts to the dtype of the hidden states, as the models do, and multiplies by random signs.

    Without the signs, sums over a row of the incoming gradients, which are waves, would be almost zero.
    """
    signs = torch.randint(0, 2, y.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return (y * signs).to(h.dtype)


def _stock(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool) -> Tensor:
    experts, offsets = _order(h)
    rows = None if bias is None else bias[experts]
    if h.dtype == torch.float64:
        # stock's grouped products have no kernel for it
        each = weight[experts] if transposed else weight[experts].transpose(-2, -1)
        y = torch.einsum("si,sio->so", h, each)
        return (y if rows is None else y + rows) * routing.unsqueeze(-1)
    y = moe._grouped_linear(h, weight, offsets, bias=rows, is_transposed=transposed)
    if y.requires_grad:
        # stock's backward accepts no other memory order
        y.register_hook(lambda grad: grad.contiguous())
    return _mixed(y * routing.unsqueeze(-1), h)


def _ours(h: Tensor, weight: Tensor, bias: Tensor | None, routing: Tensor, transposed: bool) -> Tensor:
    return _mixed(ops.experts_down(h, weight, bias, routing, *_order(h), GROUPED_PRODUCTS[transposed]), h)


def experts_cases() -> list[Case]:
    def inputs(batch: int, dtype: torch.dtype, transposed: bool, bias: bool, wide: bool) -> Inputs:
        weight = rand(EXPERTS, 8, 16, dtype=dtype) if transposed else rand(EXPERTS, 16, 8, dtype=dtype)
        routing = rand(5 * batch, dtype=torch.promote_types(dtype, torch.float32) if wide else dtype)
        return [rand(5 * batch, 8, dtype=dtype), weight, rand(EXPERTS, 16, dtype=dtype) if bias else None, routing]

    def case(name: str, transposed: bool = False, bias: bool = False, wide: bool = False) -> Case:
        def kept(x: Inputs) -> int:
            rows = x[0].size(0)
            # the last term is that of the signs
            return size(x[0]) + 4 * EXPERTS + (8 * rows if bias else 0) + 8 * rows * 16

        functions = (partial(function, transposed=transposed) for function in (_ours, _stock))
        make = partial(inputs, transposed=transposed, bias=bias, wide=wide)
        options = {"bits": (), "gradcheck": False, "strided": False}
        return Case(f"experts_{name}", *functions, make, 1, kept, **options)

    return [case("plain"), case("bias", bias=True), case("transposed", transposed=True), case("wide", wide=True)]


def recomputed_cases() -> list[Case]:
    def stock(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate.clamp(max=1.0)) * (up + 1)

    return [
        Case(
            "recomputed",
            partial(ops.recomputed, stock=stock),
            stock,
            lambda batch, dtype: [rand(batch, 3, 8, dtype=dtype)],
            1,
            lambda x: size(x[0]),
        )
    ]
