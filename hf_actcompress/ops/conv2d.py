"""Convolution of feature maps that keeps the record of its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import Stored, applied, dropping, is_dropped, load, parameter, save
from ..reference import ConvGeometry
from .autocast import autocast_dtype
from .first_order import once_differentiable
from .linear import input_record


class Conv2dFunction(torch.autograd.Function):
    """Keeps x by its record and a reference to the weight parameter."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry, codec: Codec, derive: bool
    ) -> Tensor:  # x [B, C, H, W], weight [O, C / groups, kh, kw], bias [O]
        autocast = autocast_dtype(x)
        dtype = autocast or x.dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # even if the sizes agree, channels are not the rows of a batch
        with dropping(None):
            record = input_record(x, dtype, codec, derive) if needs_weight else None
        if record is not None and is_dropped(record):
            record = Stored(codec, *codec.pack(x.detach().to(dtype)))
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
        x, weight = load(ctx)
        dtype, x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        weight = weight.to(dtype) if weight is not None else None
        if x is not None and ctx.channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        grads = implementation("conv2d_bwd", dy)(dy, x, weight, ctx.shapes, ctx.geometry, ctx.needs_input_grad[2])
        dtypes = (x_dtype, weight_dtype, bias_dtype)
        return (*(g.to(to) if g is not None else None for g, to in zip(grads, dtypes, strict=True)), None, None, None)


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
        x: ``[B, C, H, W]``, floating point; under autocast of any dtype, otherwise of the weight's.
        weight: ``[O, C / groups, kh, kw]``.
        bias: ``[O]`` or None.
        geometry: Stride, padding and dilation as (height, width), and groups.
        codec: How x is stored if it has to be; one of layout "image" pools squares of pixels.
        derive: False: store x through the codec even if it could be rebuilt.

    Returns:
        ``[B, O, H', W']``, equal to the stock module's.

    Saves:
        Nothing if the weight is frozen or x is derived; else x through the codec. The weight by reference. Who made x
        may hold it too: BatchNorm keeps its input, not its output; a ReLU in stock its output.

    Gradient:
        Exact, bit-equal to stock (identity codec). With another codec dx and dbias are, which do not depend on x; the
        weight's is that of the x that was stored.

    Source:
        Pooled feature maps: arXiv 2409.11902.
    """
    y: Tensor = applied(Conv2dFunction, x, weight, bias, geometry, codec, derive)
    return y
