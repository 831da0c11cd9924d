"""Integers of 10 bits: the 8 bits of `IntGroup`, and 2 for the quarter of the step in which a number lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..reference.bits import pack_rows, row_bytes, unpack_rows
from ..reference.groups import row_chunks, row_slices, within_range, work_dtype
from .codec import Codec, TensorMeta, meta_of
from .int_group import IntGroup

# bits that tell the quarter of a step
_WITHIN = 2


@dataclass(frozen=True)
class IntFine(Codec):
    """Group quantisation, rounded to nearest, in 8 bits and 2 more.

    For queries and keys whose scores are not scaled (T5): 8 bits are too few there. Smaller groups help less: on T5
    after 20 steps, groups of 16, which take nearly as many bytes, lower attention's error by 13%, two more bits by 74%.

    Bytes: ``1.25 + 4 / group_size`` per element.
    Error: up to an eighth of a step of 8 bits, and a few roundings of fp32.
    Bias: at most that error.

    Args:
        group_size: Features that share a scale and a zero point, as `IntGroup` has them.

    Raises:
        ValueError: A group size below 1.
    """

    takes_rows = True
    bits = 8 + _WITHIN
    group_size: int = 64

    def __post_init__(self) -> None:
        self._coarse()

    def _coarse(self) -> IntGroup:
        return IntGroup(8, self.group_size)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        coarse, _ = self._coarse().pack(x)
        codes = coarse[0]
        within = codes.new_empty(codes.size(0), row_bytes(meta.features, _WITHIN))
        for part, chunk in row_chunks(x):
            middle, step = self._decoded([kept[part] for kept in coarse], meta)
            # for a group of equal or non-finite numbers this is not finite, and its codes do not matter
            quarters = ((chunk - middle) / step * 4 + 2).nan_to_num().clamp_(0, 3).byte()
            within[part] = pack_rows(pad(quarters, (0, -meta.features % 4)), _WITHIN)
        return (*coarse, within), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known, (*coarse, within) = meta_of(meta), tensors
        out = within.new_empty(within.size(0), known.features, dtype=known.dtype)
        for part in row_slices(out.size(0), known.features, out.device) if known.features else ():
            middle, step = self._decoded([kept[part] for kept in coarse], known)
            quarters = unpack_rows(within[part], _WITHIN)[:, : known.features]
            # the middle of the quarter
            values = middle.add_((quarters.to(step.dtype) - 1.5).mul_(step / 4))
            out[part] = within_range(values, step, known.dtype)
        return out.view(known.shape)

    def _decoded(self, coarse: Sequence[Tensor], meta: TensorMeta) -> tuple[Tensor, Tensor]:
        """Some rows [r, D] decoded from 8 bits, not rounded to x's dtype, and the step [r, D] of each number."""
        codes, scale, _ = coarse
        work = work_dtype(meta.dtype)
        middle = self._coarse().unpack(tuple(coarse), TensorMeta(torch.Size((codes.size(0), meta.features)), work))
        # the scale of a group of equal numbers is `tiny`; its step becomes 0, so that the values decoded from 8 bits
        # do not change
        step = scale.to(work) - torch.finfo(torch.bfloat16).tiny
        return middle, step.repeat_interleave(self.group_size, 1)[:, : meta.features]

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        x = TensorMeta(shape, dtype)
        return self._coarse().nbytes(shape, dtype) + x.rows * row_bytes(x.features, _WITHIN)
