"""The identity codec: the tensor itself, no copy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Identity:
    """Keep a tensor as it is: `element_size()` bytes per element, exact, shared with whoever else keeps it."""

    @property
    def lossless(self) -> bool:
        return True

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        return (x,), None

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        return tensors[0]
