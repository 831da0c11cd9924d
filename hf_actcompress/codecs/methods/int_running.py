"""Integers of 8 bits whose ranges are means over the last steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...dispatch import implementation
from ...reference.methods.int_running import group_ranges
from ...reference.rng import Generators, drawn_from
from ...roles import Role
from ..codec import Codec, TensorMeta, meta_of

# the roles whose modules store one tensor: a module that stores several (q, k and v) would mix their ranges
_ONE_TENSOR = (Role.ACTIVATION, Role.CONV2D, Role.LINEAR, Role.NORM)


@dataclass(frozen=True)
class IntRunning(Codec):
    """8 bits with stochastic rounding; all tokens share one range per head, or per chunk of features without heads.

    The range follows the tensors of the last steps: the new one is ``decay`` times the former one plus ``1 - decay``
    times this tensor's. A value outside of it is clamped. Where the module stores several tensors (q, k and v; gate and
    up), in compiled graphs and outside of a patched model, the range is that of the tensor itself.

    Bytes: ``1`` per element, and 8 per group for the whole tensor.
    Bias: none inside of the range, unless signs are kept. What lies outside is clamped, which pulls it towards the
        range.
    Source: Mesa (arXiv 2111.11124). There ranges are parameters of the model, and a value above its range wraps around
        to the lower end; here ranges belong to the patch, and values are clamped.

    Args:
        group_size: Features that share a range. In a tensor of heads ``[..., H, D]`` each head has one.
        decay: The share of the former range in the new one, in [0, 1).
        keep_sign: As for `IntGroup`, where the range has values on both sides of zero.
        place: The name of the module, under which its range is known; no part of the format.
        generators: The generators that rounding draws from and that hold the ranges; they are not part of the format.

    Raises:
        ValueError: A group size below 1, a decay outside [0, 1).
    """

    takes_rows = True
    group_size: int = 64
    decay: float = 0.9
    keep_sign: bool = False
    place: str = field(default="", compare=False, repr=False)
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size < 1 or not 0 <= self.decay < 1:
            raise ValueError(f"group_size >= 1 and 0 <= decay < 1; found {self.group_size} and {self.decay}")

    def _layout(self, x: TensorMeta) -> tuple[int, int, int]:
        """(rows, features, features of a group): heads are side by side."""
        if len(x.shape) < 4:
            return x.rows, x.features, min(self.group_size, max(x.features, 1))
        return x.shape[:-2].numel(), x.shape[-2:].numel(), max(x.features, 1)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        rows, features, group = self._layout(meta)
        x = x.reshape(rows, features)
        if not x.numel():
            return (x.to(torch.uint8), x.new_zeros(2, -(-features // group), dtype=torch.float32)), meta
        ranges = self._followed(group_ranges(x, group))
        pack = implementation("int_running_pack", x)
        codes = drawn_from(self.generators, pack, x, ranges, group, self.keep_sign)
        return (codes, ranges), meta

    def _followed(self, ranges: Tensor) -> Tensor:
        """The running ranges [2, n] after a tensor with the ranges `ranges`; they are remembered for the next one."""
        if not self.place or self.generators is None or torch.compiler.is_compiling():
            return ranges
        before: Tensor | None = self.generators.learnt.get(self.place)
        if before is not None and before.shape == ranges.shape and before.device == ranges.device:
            # a step that overflowed teaches no range, and its gradient has to show the overflow
            followed = before.to(ranges.dtype).lerp(ranges, 1 - self.decay)
            self.generators.learnt[self.place] = torch.where(ranges.isfinite(), followed, before.to(ranges.dtype))
            return torch.where(ranges.isfinite(), followed, ranges)
        self.generators.learnt[self.place] = torch.where(ranges.isfinite(), ranges, 0)
        return ranges

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        known = meta_of(meta)
        codes, ranges = tensors
        if not codes.numel():
            return codes.to(known.dtype).view(known.shape)
        unpack = implementation("int_running_unpack", codes)
        rows: Tensor = unpack(codes, ranges, known.dtype, self._layout(known)[2])
        return rows.view(known.shape)

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    def used_in(self, module: str, role: str) -> Codec:
        return replace(self, place=module) if role in _ONE_TENSOR else self

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, features, group = self._layout(TensorMeta(shape, dtype))
        wide = 8 if dtype == torch.float64 and shape.numel() else 4
        return rows * features + 2 * wide * -(-features // group)
