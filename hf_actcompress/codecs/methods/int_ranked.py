"""Integers that give the groups with the widest ranges more bits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...reference.bits import pack_mask, unpack_mask
from ...reference.rng import Generators
from ..codec import Codec, TensorMeta, check_fraction, kept, meta_of
from ..int_group import IntGroup


@dataclass(frozen=True)
class IntRanked(Codec):
    """Group quantisation with stochastic rounding of the flattened tensor, in which the widest groups get more bits.

    The squared error of a group is its squared range over the squared number of levels, and the gradient's error grows
    with the sum of these. The number of groups that get more bits is fixed, so that the shapes of the packed tensors do
    not depend on values; the groups themselves are chosen anew in every tensor.

    Bytes: ``(low + share (high - low)) / 8 + 4 / group_size + 1 / (8 group_size)`` per element.
    Bias: as `IntGroup` with stochastic rounding: none.
    Source: ActNN (arXiv 2104.14129), which gives each sample between 1 and 8 bits by its range and its gradient's norm
        in the last epoch, so that the mean is 2. The authors' code has the layer's mean gradient instead unless told
        otherwise: within a layer that leaves the ranges. Here each group gets one of two widths, by its range alone,
        and all layers have the same mean.

    Args:
        low: Bits of most groups.
        high: Bits of the others.
        share: The share of groups, those with the widest ranges, that get the `high` bits, in (0, 1].
        group_size: Elements that share a scale and a zero point, neighbours in the flattened tensor.
        keep_sign: As for `IntGroup`.
        generators: The generators that rounding draws from; they are not part of the format.

    Raises:
        UnknownOptionError: Another number of bits.
        ValueError: A share outside (0, 1], a group size below 1.
    """

    takes_rows = True
    low: int = 2
    high: int = 4
    share: float = 0.125
    group_size: int = 256
    keep_sign: bool = False
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fraction(self.share)
        self._of(self.low)
        self._of(self.high)

    def _of(self, bits: int) -> IntGroup:
        return IntGroup(bits, self.group_size, "stochastic", keep_sign=self.keep_sign, generators=self.generators)

    def _counts(self, elements: int) -> tuple[int, int]:
        """(groups, those with the higher number of bits)."""
        # rounded up in positive numbers: Dynamo cannot divide a negative symbol
        groups = (elements + self.group_size - 1) // self.group_size
        return groups, kept(self.share, groups)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        count, wide = self._counts(x.numel())
        flat, missing = x.reshape(-1), -x.numel() % self.group_size
        # padded with the last number, which does not widen the range of its group
        flat = torch.cat((flat, flat[-1:].expand(missing))) if missing else flat
        groups = flat.view(count, self.group_size)
        # a group with a NaN or inf is the widest
        ranges = groups.amax(1).float() - groups.amin(1).float()
        widest = ranges.topk(wide, sorted=False).indices
        chosen = torch.zeros(count, dtype=torch.bool, device=x.device).index_fill_(0, widest, True)
        order = _widest_first(chosen)
        (high, _), (low, _) = (
            self._of(self.high).pack(groups[order[:wide]]),
            self._of(self.low).pack(groups[order[wide:]]),
        )
        return (*high, *low, pack_mask(chosen)), meta

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        elements = known.shape.numel()
        count, wide = self._counts(elements)
        order = _widest_first(unpack_mask(tensors[6], torch.Size((count,))))
        parts = (self.high, tensors[:3], wide), (self.low, tensors[3:6], count - wide)
        rows = [
            self._of(bits).unpack(kept, TensorMeta(torch.Size((groups, self.group_size)), known.dtype))
            for bits, kept, groups in parts
        ]
        out = rows[0].new_empty(count, self.group_size).index_copy_(0, order, torch.cat(rows))
        return out.view(-1)[:elements].view(known.shape)

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        count, wide = self._counts(shape.numel())
        sizes = ((self.high, wide), (self.low, count - wide))
        groups = sum(self._of(bits).nbytes(torch.Size((n, self.group_size)), dtype) for bits, n in sizes)
        return groups + -(-count // 8)


def _widest_first(chosen: Tensor) -> Tensor:
    """The positions int64 [N] of the chosen [N], bool, and then of the others, each in order."""
    return chosen.logical_not().to(torch.uint8).argsort(stable=True)
