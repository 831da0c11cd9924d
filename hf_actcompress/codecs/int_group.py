"""Integers of 8, 5, 4, 3 or 2 bits in groups along the feature axis."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..dispatch import implementation, kernel_wins, runs_kernel
from ..errors import UnknownOptionError
from ..reference.bits import row_bytes
from ..reference.int_group import outlier_channels
from ..reference.rng import Generators, drawn_from
from .codec import Codec, TensorMeta, meta_of

BITS = (2, 3, 4, 5, 8)
ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class IntGroup(Codec):
    """Group quantisation: each group of neighbouring features has its own range, each feature its code in it.

    Ranges are those of the tensor itself, which costs one reading; Mesa's running ranges are `IntRunning`, ActNN's
    wider codes for wide groups `IntRanked`, GACT's measured bits `IntMeasured`.

    Bytes: ``bits / 8 + 4 / group_size`` per element (scale and zero point in bf16), plus ``outliers`` channels in x's
        dtype. bf16 has the range of fp32, where an fp16 scale would overflow. It is rounded outwards, so that nothing
        is clipped: on hidden states of MiniLM the error is 2% larger than with fp32 at 8 bits and 0.5% at 4.
    Error: to nearest up to half a step and, because a code is a product with the reciprocal of the scale, a few
        roundings of fp32 more: of two codes that are equally near, either may be taken.
    Bias: none under stochastic rounding before the decoded number is rounded to x's dtype. That last rounding is to
        nearest and always the same, so with 8 bits in bf16 the mean of many draws stays up to half a step away from the
        largest values (7% of a step in root mean square; 1% with 4 bits, where a step is wider; none in fp32). Under
        rounding to nearest up to half a step; its error is smaller by a factor of 1.41.
    Source: ActNN (arXiv 2104.14129), GACT (arXiv 2206.11357); outlier channels as HyC-LoRA (MLSys 2025) has them.

    Args:
        bits: 8, 5, 4, 3 or 2 per element.
        group_size: Features that share a scale and a zero point; the last group of a row may be shorter.
        rounding: "nearest" or "stochastic".
        outliers: How many channels, those with the largest magnitude, are kept apart as they are.
        keep_sign: Move a code by one where rounding has crossed zero, so that what is decoded is above zero where x is,
            but for values too small beside their group's range (`reference/groups.py`).
            The format is the same. Under stochastic rounding this adds a bias: a value whose two neighbouring codes lie
            on both sides of zero always becomes the one on its own side.
        generators: The generators that stochastic rounding draws from; not part of the format. None: the process's.

    Raises:
        UnknownOptionError: Another number of bits, another rounding.
        ValueError: A group size below 1, a negative number of outliers.
    """

    takes_rows = True
    bits: int = 8
    group_size: int = 64
    rounding: str = "nearest"
    outliers: int = 0
    keep_sign: bool = False
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise UnknownOptionError("bits", self.bits, BITS)
        if self.rounding not in ROUNDINGS:
            raise UnknownOptionError("rounding", self.rounding, ROUNDINGS)
        if self.group_size < 1 or self.outliers < 0:
            raise ValueError(f"group_size >= 1 and outliers >= 0; found {self.group_size} and {self.outliers}")

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        kept: tuple[Tensor, ...] = ()
        channels = None
        if self.outliers and x.numel():
            rows = x.reshape(-1, meta.features)
            channels = outlier_channels(rows, min(self.outliers, meta.features))
            kept = (rows.index_select(1, channels), channels)
        pack, stochastic = implementation("int_group_pack", x), self.rounding == "stochastic"
        args = x, self.bits, self.group_size, stochastic, channels, self.keep_sign
        made = drawn_from(self.generators, pack, *args) if stochastic else pack(*args)
        return (*made, *kept), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        codes, scale, zero = tensors[:3]
        unpack = implementation("int_group_unpack", codes)
        rows: Tensor = unpack(codes, scale, zero, known.features, known.dtype, self.bits, self.group_size)
        if len(tensors) > 3:
            values, channels = tensors[3:]
            rows.index_copy_(1, channels, values)
        return rows.view(known.shape)

    def has_grad_weight(self, dy: Tensor) -> bool:
        # codes of 3 and of 5 bits are stored in two fields, which the kernel cannot read
        return self.bits not in (3, 5) and runs_kernel("int_group_grad_weight", dy)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        if not self.has_grad_weight(dy):
            # without the kernel, unpacking and torch's product are the fastest
            return None
        (codes, scale, zero, *outliers), known = tensors, meta_of(meta)
        packed = codes, scale, zero, known.features, self.bits, self.group_size
        args = dy.reshape(-1, dy.size(-1)), *packed, *outliers
        if not kernel_wins("int_group_grad_weight", _unpacked_product, *args):
            return None
        out: Tensor = implementation("int_group_grad_weight", dy)(*args)
        return out

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators) if self.rounding == "stochastic" else self

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        x = TensorMeta(shape, dtype)
        per_row = row_bytes(x.features, self.bits) + 4 * -(-x.features // self.group_size)
        outliers = min(self.outliers, x.features) if shape.numel() else 0
        return x.rows * (per_row + outliers * dtype.itemsize) + 8 * outliers


def _unpacked_product(
    dy: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, features: int, bits: int, group_size: int, *_: Tensor
) -> Tensor:
    """dW as it is computed if `grad_weight` returns None, without the outliers."""
    unpack = implementation("int_group_unpack", codes)
    return dy.t().mm(unpack(codes, scale, zero, features, dy.dtype, bits, group_size))
