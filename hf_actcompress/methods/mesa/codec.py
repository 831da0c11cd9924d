"""Integers of 8 bits whose ranges are means over the last steps."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...codecs.codec import Codec, TensorMeta, meta_of
from ...compiling import is_compiling
from ...dispatch import implementation
from ...reference.rng import Generators, drawn_from
from ...roles import Role
from .reference import group_ranges

# the roles whose modules store one tensor, and those whose modules name each of several (q, k and v; gate and up)
_ONE_TENSOR = (Role.ACTIVATION, Role.CONV2D, Role.LINEAR, Role.NORM)
_NAMED_PARTS = (Role.ATTENTION, Role.GATED_MLP)
# the roles whose modules work along the last axis, so that it holds the features of a tensor of four axes, too
_FEATURES_LAST = (Role.LINEAR, Role.NORM)


@dataclass(frozen=True)
class IntRunning(Codec):
    """8 bits with stochastic rounding; all tokens share one range per head, channel, or chunk of features.

    The range follows the tensors of the last steps: the new one is ``decay`` times the former one plus ``1 - decay``
    times this tensor's. A value outside of it is clamped. q, k, v and the output of attention, and gate and up of a
    gated MLP, have ranges of their own. In compiled graphs, outside of a patched model and where no rule knows the
    module, the range is that of the tensor itself.

    A tensor of four axes is ``[B, H, S, D]`` or ``[B, C, H, W]``: each head or channel has one range. Linear layers and
    norms read ``[B, H, W, C]``, of which the last axis has ranges. The input of an activation is not known to be the
    one or the other: there, an image whose channels come last has one range for each line of pixels.

    Bytes: ``1`` per element, and 8 per group for the whole tensor.
    Bias: none inside of the range, unless signs are kept. What lies outside is clamped, which pulls it towards the
        range.
    Source: Mesa (arXiv 2111.11124). There ranges are parameters of the model, and a value above its range wraps around
        to the lower end; here ranges belong to the patch, and values are clamped.

    Args:
        group_size: Features that share a range, where neither heads nor channels have their own.
        decay: The share of the former range in the new one, in [0, 1).
        keep_sign: As for `IntGroup`, where the range has values on both sides of zero.
        heads: Whether a tensor is ``[..., H, D]``, and each of the H heads has a range.
        last: Whether the last of four axes holds the features.
        place: The name of the tensor, under which its range is known; no part of the format.
        module: The name of a module that stores several tensors, of which `part` makes places; no part of the format.
        generators: The generators that rounding draws from and that hold the ranges; they are not part of the format.

    Raises:
        ValueError: A group size below 1, a decay outside [0, 1).
    """

    takes_rows = True
    group_size: int = 64
    decay: float = 0.9
    keep_sign: bool = False
    heads: bool = False
    last: bool = False
    place: str = field(default="", compare=False, repr=False)
    module: str = field(default="", compare=False, repr=False)
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size < 1 or not 0 <= self.decay < 1:
            raise ValueError(f"group_size >= 1 and 0 <= decay < 1; found {self.group_size} and {self.decay}")

    def on_feature_maps(self) -> Codec:
        # its ranges are those of channels already
        return self

    @property
    def heads_apart(self) -> bool:
        return self.heads

    def _swaps(self, shape: torch.Size) -> bool:
        """Whether the second of four axes has the ranges, and is laid beside the last one."""
        return len(shape) == 4 and not self.heads and not self.last

    def _layout(self, shape: torch.Size) -> tuple[int, int, int]:
        """(rows, features, features of a group) of a tensor whose axes are in the order in which they are packed."""
        if self._swaps(shape) or (self.heads and len(shape) > 2):
            return shape[:-2].numel(), shape[-2:].numel(), max(shape[-1], 1)
        features = shape[-1] if shape else 1
        return shape[:-1].numel(), features, min(self.group_size, max(features, 1))

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        meta = TensorMeta.of(x)
        x = x.transpose(1, 2) if self._swaps(x.shape) else x
        rows, features, group = self._layout(x.shape)
        x = x.reshape(rows, features)
        if not x.numel():
            return (x.to(torch.uint8), x.new_zeros(2, -(-features // group), dtype=torch.float32)), meta
        ranges = self._followed(group_ranges(x, group))
        pack = implementation("int_running_pack", x)
        codes = drawn_from(self.generators, pack, x, ranges, group, self.keep_sign)
        return (codes, ranges), meta

    def _followed(self, ranges: Tensor) -> Tensor:
        """The running ranges [2, n] after a tensor with the ranges `ranges`; they are remembered for the next one."""
        if not self.place or self.generators is None or is_compiling():
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
        shape = self._packed_shape(known.shape)
        values: Tensor = unpack(codes, ranges, known.dtype, self._layout(shape)[2]).view(shape)
        return values.transpose(1, 2).contiguous() if self._swaps(shape) else values

    def _packed_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((shape[0], shape[2], shape[1], shape[3])) if self._swaps(shape) else shape

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    @property
    def row(self) -> Codec:
        return replace(self, last=False)

    def used_in(self, module: str, role: str) -> Codec:
        if role in _ONE_TENSOR:
            return replace(self, place=module, last=role in _FEATURES_LAST)
        return replace(self, module=module) if role in _NAMED_PARTS else self

    def part(self, name: str, heads: bool = False) -> Codec:
        return replace(self, place=f"{self.module} {name}" if self.module else "", heads=heads)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        rows, features, group = self._layout(self._packed_shape(shape))
        wide = 8 if dtype == torch.float64 and shape.numel() else 4
        return rows * features + 2 * wide * -(-features // group)
