"""y = x W^T + b that keeps the record of x: nothing at all if x is derived, or if the weight is frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ..dispatch import implementation
from ..private_apis import not_a_view
from ..records import Record, Stored, applied, encoded, load_packed, parameter, record_of, save
from ._cast import cast_record
from .autocast import autocast_dtype
from .first_order import once_differentiable

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]


class LinearFunction(torch.autograd.Function):
    """Keeps x by its record and a reference to the weight parameter, never a cast copy of the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, codec: Codec, derive: bool
    ) -> Tensor:  # x [..., I], weight [O, I] or [I, O], bias [O]
        dtype = keep_operands(ctx, x, weight, bias, transposed, codec, derive)
        if autocast_dtype(x) is not None:
            # without autocast nothing is cast: mixed dtypes are an error, as in stock
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
        return no_view(product(x, weight, bias, transposed, trained=ctx.needs_input_grad[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> _Grads:  # dy [..., O]
        x, weight = load_packed(ctx, dy)
        dtype, x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        # the weight is cast again: keeping the cast copy would cost 2 bytes per parameter
        weight = weight.to(dtype) if weight is not None else None
        dweight = _packed_dweight(dy, x, ctx.transposed) if isinstance(x, Stored) else None
        x = None if dweight is not None else x.unpack() if isinstance(x, Stored) else x
        dx, dense, dbias = implementation("linear_bwd", dy)(dy, x, weight, ctx.transposed, ctx.needs_input_grad[2])
        dweight = dense if dweight is None else dweight
        return (
            dx.to(x_dtype) if dx is not None else None,
            dweight.to(weight_dtype) if dweight is not None else None,
            dbias.to(bias_dtype) if dbias is not None else None,
            None,
            None,
            None,
        )


class UnreadLinearFunction(LinearFunction):
    """`LinearFunction` for an output whose values are not read: it returns zeros and computes no product."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, codec: Codec, derive: bool
    ) -> Tensor:  # x [..., I], weight [O, I] or [I, O], bias [O]
        dtype = keep_operands(ctx, x, weight, bias, transposed, codec, derive)
        return x.new_zeros((*x.shape[:-1], weight.shape[1 if transposed else 0]), dtype=dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, *, trained: bool) -> Tensor:
    """x W^T + b with stock's bits, in a forward that records nothing.

    Torch asks whether the weight wants a gradient (`trained`): without a bias, it then multiplies all rows of x at
    once, and otherwise each [T, I] of a batch whose rows have gaps between them.
    """
    forward = implementation("linear_fwd", x)
    if not trained or bias is not None or transposed or x.dim() < 3 or x.is_contiguous():
        return forward(x, weight, bias, transposed)  # type: ignore[no-any-return]
    y = forward(x.flatten(0, -2), weight, None, False)
    return y.view(*x.shape[:-1], y.size(-1))  # type: ignore[no-any-return]


def keep_operands(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    transposed: bool = False,
    codec: Codec = IDENTITY,
    derive: bool = True,
) -> torch.dtype:
    """Keep what backward needs, and return the dtype of the product."""
    dtype = autocast_dtype(x) or x.dtype
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    record = input_record(x, dtype, codec, derive) if needs_weight else None
    save(ctx, record, parameter(weight) if needs_x else None)
    ctx.dtypes = (dtype, x.dtype, weight.dtype, bias.dtype if bias is not None else None)
    ctx.transposed = transposed
    return dtype


def _packed_dweight(dy: Tensor, x: Stored, transposed: bool) -> Tensor | None:
    """dweight computed from the packed x; None if unpacking is cheaper."""
    dweight = x.codec.grad_weight(dy, x.tensors, x.meta)
    return dweight.t() if dweight is not None and transposed else dweight


def no_view(y: Tensor) -> Tensor:
    """y over the same memory, as a tensor that is not a view.

    A linear layer with a bias returns a view of the product over rows. Autograd forbids in-place writes to a view that
    a Function returned, and model code writes in place (``Sequential(Linear, ReLU(inplace=True))``, adapters).
    """
    return y if is_compiling() else not_a_view(y)


def input_record(x: Tensor, dtype: torch.dtype, codec: Codec, derive: bool) -> Record:
    """The record of x as the product reads it, in the autocast dtype."""
    if not derive:
        return encoded(x, codec, dtype)
    if x.dtype == dtype:
        return record_of(x, codec)
    return cast_record(x, dtype, codec)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    codec: Codec = IDENTITY,
    derive: bool = True,
    unread: bool = False,
) -> Tensor:
    """Linear layer that keeps its input by record.

    Args:
        x: ``[..., I]``, floating point: any dtype under autocast, otherwise the weight's.
        weight: ``[O, I]`` as nn.Linear has it, or ``[I, O]`` (transformers' Conv1D) with ``transposed``.
        bias: ``[O]`` or None.
        transposed: The layout of the weight.
        codec: How x is stored if it has to be.
        derive: False: store x through the codec even if it could be rebuilt.
        unread: Whether only the output's gradient is used and not its values: the output is zero, without a product.

    Returns:
        ``[..., O]`` in the autocast dtype or x's, equal to the stock module's.

    Saves:
        Nothing if the weight is frozen or x is derived; else x through the codec, shared with its other consumers.
        The weight by reference. Under autocast, x as `cast_record` keeps it, and no cast weight: it is cast again.

    Gradient:
        Exact, bit-equal to stock (identity codec).
    """
    function = UnreadLinearFunction if unread else LinearFunction
    return applied(function, x, weight, bias, transposed, codec, derive)
