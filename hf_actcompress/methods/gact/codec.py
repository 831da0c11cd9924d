"""Integers whose bits are chosen by how much their rounding changes the gradient."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...codecs.bit_allocation import layer_of
from ...codecs.codec import Codec, TensorMeta
from ...codecs.int_group import IntGroup
from ...compiling import is_compiling
from ...reference.rng import Generators


@dataclass
class Width:
    """The bits of the tensors of one role in one layer, as they are now.

    Attributes:
        bits: Bits of each element; 0 while the exact gradient is measured, for which the tensors are kept as they are.
        elements: The number of elements stored since this field was set to 0.
    """

    bits: int
    elements: int = 0


@dataclass(frozen=True)
class WidthMeta:
    """The static half: the inner codec's, and that codec; it is None for a tensor that was kept as it is."""

    inner: object
    codec: Codec | None


@dataclass(frozen=True)
class IntMeasured(Codec):
    """Group quantisation with stochastic rounding, whose bits differ between layers and roles and change in training.

    `model.py` measures how much the gradient suffers from each layer's rounding. It then
    sets the bits of all of them so that their mean is `bits`. Before that, and outside of a patched model, all have
    `bits`.

    Bytes: on average ``bits / 8 + 4 / group_size`` per element; 2, 3, 4 or 8 bits at one place.
    Bias: as `IntGroup` with stochastic rounding: none, unless signs are kept. The bits depend on earlier batches alone.
    Source: GACT (arXiv 2206.11357).

    Args:
        bits: The mean over all elements.
        group_size: Features that share a scale and a zero point.
        keep_sign: As for `IntGroup`.
        width: The bits at the place where this codec is used; no part of the format.
        generators: The generators that rounding draws from and that hold the widths; they are not part of the format.
    """

    takes_rows = True
    bits: int = 4
    group_size: int = 256
    keep_sign: bool = False
    width: Width | None = field(default=None, compare=False, repr=False)
    generators: Generators | None = field(default=None, compare=False, repr=False)

    def _now(self) -> IntGroup | None:
        # a compiled graph is made for one width
        bits = self.bits if self.width is None or is_compiling() else self.width.bits
        if not bits:
            return None
        return IntGroup(bits, self.group_size, "stochastic", keep_sign=self.keep_sign, generators=self.generators)

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        codec = self._now()
        if codec is None:
            assert self.width is not None
            self.width.elements += x.numel()
            return (x,), WidthMeta(TensorMeta.of(x), None)
        tensors, meta = codec.pack(x)
        return tensors, WidthMeta(meta, codec)

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        assert isinstance(meta, WidthMeta)
        return tensors[0] if meta.codec is None else meta.codec.unpack(tensors, meta.inner)

    def has_grad_weight(self, dy: Tensor) -> bool:
        return IntGroup(4).has_grad_weight(dy)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        assert isinstance(meta, WidthMeta)
        return None if meta.codec is None else meta.codec.grad_weight(dy, tensors, meta.inner)

    def drawing_from(self, generators: Generators) -> Codec:
        return replace(self, generators=generators)

    def used_in(self, module: str, role: str) -> Codec:
        assert self.generators is not None
        place = f"{layer_of(module)} {role}"
        return replace(self, width=self.generators.learnt.setdefault(place, Width(self.bits)))

    def keeping_sign(self) -> Codec:
        return replace(self, keep_sign=True)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes at the mean width."""
        return IntGroup(self.bits, self.group_size).nbytes(shape, dtype)
