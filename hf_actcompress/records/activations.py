"""Which of the tensors saved by unknown code are activations: a lossy codec may store only those."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..codecs import Codec
from ..codecs.feature_maps import on_feature_maps

# the fewest elements, in all and in each row, for which a codec is worth its cost
_LARGE, _ROW = 512, 16
# the nodes of convolutions
CONVOLUTIONS = frozenset(("ConvolutionBackward0", "Conv2dFunctionBackward"))
# these ops make losses, and sums and powers over many steps, in which an error grows
_EXACT = {"CumsumBackward0", "CumprodBackward0", "ExpBackward0", "LogSoftmaxBackward0", "LogcumsumexpBackward0"}
# these ops change weights before they are used: views, casts, norms, sums with adapters
_OF_WEIGHTS = {
    "AccumulateGrad", "AddBackward0", "CatBackward0", "CloneBackward0", "DivBackward0", "ExpandBackward0",
    "LinalgVectorNormBackward0", "MulBackward0", "NormBackward1", "PermuteBackward0", "PowBackward0",
    "ReshapeAliasBackward0", "SelectBackward0", "SliceBackward0", "SplitBackward0", "SqueezeBackward1",
    "SumBackward1", "TBackward0", "ToCopyBackward0", "TransposeBackward0", "UnsafeViewBackward0",
    "UnsqueezeBackward0", "ViewBackward0", "WeightNormInterfaceBackward0",
}  # fmt: skip
_STEPS = 24


def is_activation(x: Tensor) -> bool:
    """Whether a lossy codec may store x: a large floating-point result that depends on more than weights.

    A tensor class with the attribute `deferred` computes its values when they are read, and a codec would read them.
    """
    if getattr(type(x), "deferred", False):
        return False
    if x.grad_fn is None:
        return False
    if not is_large(x.dtype, x.shape, is_feature_map(x)) or not x.is_contiguous():
        return False
    return type(x.grad_fn).__name__ not in _EXACT and not _made_of_weights(x.grad_fn)


def is_large(dtype: torch.dtype, shape: Sequence[int], image: bool) -> bool:
    """Whether tensors of such a dtype and shape are worth a codec, whose row is the last axis, or an image."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or len(shape) < 2:
        return False
    return math.prod(shape) >= _LARGE and (math.prod(shape[1:]) if image else shape[-1]) >= _ROW


def codec_for(x: Tensor, codec: Codec) -> Codec:
    """The codec as it has to be for an activation x that stock code saves."""
    # a ReLU (and a leaky one in place) saves its result and reads its sign in backward
    relu = type(x.grad_fn).__name__ in ("ReluBackward0", "LeakyReluBackward1")
    codec = on_feature_maps(codec) if is_feature_map(x) else codec
    return codec.keeping_sign() if relu else codec


def is_feature_map(x: Tensor) -> bool:
    """Whether x is ``[B, C, H, W]`` of a convolution: a codec's row is then an image, not the last axis (a line)."""
    return x.dim() == 4 and x.size(0) > 0 and type(x.grad_fn).__name__ in CONVOLUTIONS


def _made_of_weights(node: Any) -> bool:
    """Whether the node computes from parameters alone: each path ends at a leaf after a few steps of these ops."""
    pending, seen = [node], 0
    while pending:
        node = pending.pop()
        seen += 1
        if seen > _STEPS or type(node).__name__ not in _OF_WEIGHTS:
            return False
        pending += [before for before, _ in node.next_functions if before is not None]
    return True
