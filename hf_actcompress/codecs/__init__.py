"""HOW a kept tensor is stored: pack and unpack, no autograd, no ctx.

A codec is a frozen dataclass (equal means the same format). `CODECS` is the one table: a new codec is a file here and
a row there; the contract tests iterate the rows.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .identity import Identity

__all__ = ["CODECS", "IDENTITY", "Codec", "Identity"]


class Codec(Protocol):
    """What a codec must offer. `unpack(*pack(x))` has x's shape and dtype."""

    @property
    def lossless(self) -> bool:
        """Whether `unpack(*pack(x))` equals x bit by bit."""
        ...

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        """Encode x, of any shape: the tensors to keep, and static Python data (shape, dtype)."""
        ...

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        """Decode what `pack` returned into a tensor of x's shape and dtype."""
        ...


IDENTITY = Identity()

CODECS: dict[str, Codec] = {"identity": IDENTITY}
