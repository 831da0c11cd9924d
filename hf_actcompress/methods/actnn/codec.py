"""Integers that give the samples with the widest ranges more bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, meta_of
from ...dispatch import implementation
from ...errors import UnknownOptionError
from ...reference.rng import Generators, drawn_from
from .reference import MOST, Ranked


@dataclass(frozen=True)
class IntRanked(Codec):
    """Group quantisation with stochastic rounding, in which each sample (entry of the first axis) has its own bits.

    Rounding a group has a variance of its squared range over ``(2^b - 1)^2``, and the gradient's variance grows with
    the sum of these. Each sample gets from 1 to 8 bits, so that this sum is the smallest. The mean is always `bits`, so
    the shapes of the packed tensors do not depend on values. Samples with equal ranges have `bits` each, and so has a
    single one.

    Bytes: ``bits / 8 + 4 / group_size`` per element, and 1 per sample; the elements of a sample are rounded up to a
        multiple of 8.
    Bias: as `IntGroup` with stochastic rounding: none, unless signs are kept: then a code may move by one.
    Source: ActNN (arXiv 2104.14129), which weighs a sample also by its gradient's norm in the last epoch. The authors'
        code has the layer's mean gradient instead unless told otherwise: within a layer that leaves the ranges, as
        here. ActNN also moves bits between layers; here all of them have the same mean.

    Args:
        bits: The mean over all samples.
        group_size: Elements of a sample that share a scale and a zero point.
        keep_sign: As for `IntGroup`. No sample then gets less than 2 bits, because 1 bit would be the sign alone;
            with a mean of 1 all samples get 1.
        generators: The generators that rounding draws from; they are not part of the format.

    Raises:
        UnknownOptionError: Another number of bits.
        ValueError: A group size below 1.
    """

    takes_rows = True
    bits: int = 2
    group_size: int = 256
    keep_sign: bool = False
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in range(1, MOST + 1):
            raise UnknownOptionError("bits", self.bits, range(1, MOST + 1))
        if self.group_size < 1:
            raise ValueError(f"group_size >= 1; found {self.group_size}")

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        samples, elements = _layout(x.shape)
        if not x.numel():
            return tuple(x.new_empty(0, dtype=torch.uint8) for _ in Ranked._fields), meta
        x, pack = x.reshape(samples, elements), implementation("int_ranked_pack", x)
        packed: Ranked = drawn_from(self.generators, pack, x, self.bits, self.group_size, self.keep_sign)
        return tuple(packed), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        if not known.shape.numel():
            return tensors[0].new_empty(known.shape, dtype=known.dtype)
        unpack, elements = implementation("int_ranked_unpack", tensors[0]), _layout(known.shape)[1]
        values: Tensor = unpack(Ranked(*tensors), elements, known.dtype, self.bits, self.group_size)
        return values.view(known.shape)

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        samples, elements = _layout(shape)
        groups = -(-elements // self.group_size)
        return samples * (self.bits * -(-elements // 8) + 4 * groups + 1) if shape.numel() else 0


def _layout(shape: torch.Size) -> tuple[int, int]:
    """(samples, elements of a sample); a tensor of one axis is one sample."""
    return (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
