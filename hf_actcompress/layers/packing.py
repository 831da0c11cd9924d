"""What a plan keeps through codecs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from ..codecs import Codec
from ..compilation.packing import is_of_a_relu
from ..compilation.policy import made_by
from ..programs.keeping import opened
from ..records import Stored
from .codec_marks import Mark, codec_mark
from .divide import Halves


@dataclass(frozen=True)
class Packed:
    """A kept tensor that goes through a codec.

    Attributes:
        place: Its place among the kept tensors.
        mark: Whose codec it is.
        order: Its dimensions in the order in which they lie in memory; None for a contiguous tensor.
        sign: Whether the codec must not move a value across zero.
        outside: Whether it is an input.
    """

    place: int
    mark: Mark
    order: tuple[int, ...] | None
    sign: bool
    outside: bool

    def codec_in(self, layer: nn.Module) -> Codec:
        """The codec of one layer."""
        codec = self.mark.codec_in(layer)
        return codec.keeping_sign() if self.sign else codec


class Packer:
    """Packs an activation through a codec, as a record."""

    def __init__(self, codec: Codec, order: tuple[int, ...] | None) -> None:
        self._codec, self._order = codec, order

    def __call__(self, x: Tensor) -> Stored:
        """The record of x, packed as it lies in memory."""
        return Stored(self._codec, *self._codec.pack(x if self._order is None else x.permute(self._order)))


def packed_in(halves: Halves, inputs: dict[Node, int]) -> Iterator[Packed]:
    """What is kept through the codec with which a module has marked it."""
    for i, x in enumerate(halves.kept):
        mark = codec_mark(x)
        if mark is not None:
            yield Packed(i, mark, mark.order(x.meta["val"]), is_of_a_relu(made_by(x)), x in inputs)


def opening(packed: Packed) -> Callable[[Any], Tensor]:
    """What opens a packed tensor in backward."""
    if packed.order is None:
        return opened
    back = [packed.order.index(i) for i in range(len(packed.order))]
    return lambda x: opened(x).permute(back)
