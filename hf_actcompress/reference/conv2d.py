"""y = conv2d(x, W) + b on feature maps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# stride, padding, dilation (height, width each), groups
ConvGeometry = tuple[tuple[int, int], tuple[int, int], tuple[int, int], int]


def conv2d_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: ConvGeometry) -> Tensor:
    """y [B, O, H', W'] from x [B, C, H, W]; weight [O, C / groups, kh, kw]. It is the stock module's call of torch."""
    return torch.nn.functional.conv2d(x, weight, bias, *geometry)


def conv2d_bwd(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    shapes: tuple[Sequence[int], Sequence[int]],
    geometry: ConvGeometry,
    with_bias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx (needs weight), dweight (needs x), dbias [O], from dy [B, O, H', W']; `shapes` are x's and the weight's."""
    needs = [weight is not None, x is not None, with_bias]
    # torch reads only the shape of a tensor that is missing here
    x = x if x is not None else dy.new_empty(1).expand(*shapes[0])
    weight = weight if weight is not None else dy.new_empty(1).expand(*shapes[1])
    stride, padding, dilation, groups = geometry
    # the call that autograd makes
    grads: tuple[Tensor | None, Tensor | None, Tensor | None] = torch.ops.aten.convolution_backward(
        dy, x, weight, [dy.size(1)] if with_bias else None, stride, padding, dilation, False, [0, 0], groups, needs
    )
    return grads
