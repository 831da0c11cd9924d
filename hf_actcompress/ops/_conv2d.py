"""Convolution of feature maps that keeps the record of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..codecs.feature_maps import on_feature_maps
from ..compiling import is_compiling
from ..dispatch import implementation
from ..records import Record, Stored, applied, dropping, is_dropped, load_packed, parameter, save
from ..reference import ConvGeometry
from ._linear import input_record
from .autocast import autocast_dtype
from .first_order import once_differentiable


class Conv2dFunction(torch.autograd.Function):
    """Keeps x by its record and a reference to the weight parameter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry, codec: Codec, derive: bool
    ) -> Tensor:  # x [B, C, H, W], weight [O, C / groups, kh, kw], bias [O]
        autocast = autocast_dtype(x)
        dtype = autocast or x.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        record = _record_of_maps(x, dtype, codec, derive) if needs_weight else None
        save(ctx, record, parameter(weight) if needs_x else None)
        ctx.dtypes = (dtype, x.dtype, weight.dtype, bias.dtype if bias is not None else None)
        ctx.shapes, ctx.geometry = (x.shape, weight.shape), geometry
        # a codec returns a contiguous tensor, and the memory format decides which kernel runs
        ctx.channels_last = x.is_contiguous(memory_format=torch.channels_last)
        if autocast is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype) if bias is not None else None
        return implementation("conv2d_fwd", x)(x, weight, bias, geometry)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # dy [B, O, H', W']
        x, weight = load_packed(ctx)
        dtype, x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        weight = weight.to(dtype) if weight is not None else None
        dweight = _packed_dweight(dy, x, ctx.shapes[1], ctx.geometry) if isinstance(x, Stored) else None
        x = None if dweight is not None else x.unpack() if isinstance(x, Stored) else x
        if x is not None and ctx.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        dx, dense, dbias = implementation("conv2d_bwd", dy)(
            dy, x, weight, ctx.shapes, ctx.geometry, ctx.needs_input_grad[2]
        )
        grads = (dx, dense if dweight is None else dweight, dbias)
        dtypes = (x_dtype, weight_dtype, bias_dtype)
        return (*(g.to(to) if g is not None else None for g, to in zip(grads, dtypes, strict=True)), None, None, None)


def _record_of_maps(x: Tensor, dtype: torch.dtype, codec: Codec, derive: bool) -> Record:
    """The record of x with all rows, because the second dimension of x is channels and not tokens."""
    if is_compiling():
        # in a graph nothing is dropped, and Dynamo does not trace a Function that changes a state
        return input_record(x, dtype, codec, derive)
    with dropping(None):
        record = input_record(x, dtype, codec, derive)
    return Stored(codec, *codec.pack(x.detach().to(dtype))) if is_dropped(record) else record


def _packed_dweight(dy: Tensor, x: Stored, shape: torch.Size, geometry: ConvGeometry) -> Tensor | None:
    """dweight [O, C, 1, 1] computed from the packed x; None if x has to be unpacked.

    This works only for a linear layer on pixels. A larger kernel reads each pixel several times: one convolution of the
    unpacked map is cheaper than as many products with shifted copies of dy. Nor does it pay to read dy by the indices
    of what DropIT keeps: under 3 x 3 each kept element meets nine rows of dy, which together are larger than the map.
    """
    if tuple(shape[2:]) != (1, 1) or geometry != ((1, 1), (0, 0), (1, 1), 1):
        return None
    dweight = x.codec.grad_weight(dy, x.tensors, x.meta) if x.codec.for_images else None
    return dweight.view(shape) if dweight is not None else None


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: ConvGeometry,
    *,
    codec: Codec = IDENTITY,
    derive: bool = True,
) -> Tensor:
    """2d convolution that keeps its input by record.

    Args:
        x: ``[B, C, H, W]``, floating point: any dtype under autocast, otherwise the weight's.
        weight: ``[O, C / groups, kh, kw]``.
        bias: ``[O]`` or None.
        geometry: Stride, padding and dilation as (height, width), and groups.
        codec: How x is stored if it has to be. `on_feature_maps` adapts a codec for tokens: its rows become images, or
            pixels with their channels; means of tokens become means of squares of pixels.
        derive: False: store x through the codec even if it could be rebuilt.

    Returns:
        ``[B, O, H', W']``, equal to the stock module's.

    Saves:
        Nothing if the weight is frozen or x is derived; else x through the codec. The weight by reference. The op that
        made x may keep x as well: stock's ReLU keeps its output, but BatchNorm keeps its input and not its output.

    Gradient:
        Exact, bit-equal to stock (identity codec). With another codec, dx and dbias are still exact, because they do
        not depend on x; dweight is that of the stored x.

    Source:
        Pooled feature maps: arXiv 2409.11902. The largest entries: DropIT, arXiv 2202.13808.
    """
    return applied(Conv2dFunction, x, weight, bias, geometry, on_feature_maps(codec), derive)
