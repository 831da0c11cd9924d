"""What a plan keeps through codecs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..codecs import IDENTITY, Codec
from ..codecs.feature_maps import on_feature_maps
from ..compilation.attribution import module_reading, running
from ..compilation.packing import is_of_a_relu
from ..compilation.policy import hint, made_by, op_name
from ..records import Record, Stored
from ..records.activations import is_large
from .codec_marks import OTHER, Mark, codec_mark, order_in_memory
from .divide import Halves
from .keeping import opened
from .rows import Arrangement, TokenSizes, arrangement
from .rules import made_of_these

aten = torch.ops.aten
# these make losses, and sums and powers over many steps, in which an error grows
_EXACT = {"_log_softmax", "cumprod", "cumsum", "exp", "logcumsumexp"}


@dataclass(frozen=True)
class Packed:
    """A kept tensor that goes through a codec.

    Attributes:
        place: Its place among the kept tensors.
        mark: Whose codec it is.
        order: Its dimensions in the order in which they lie in memory; None for a contiguous tensor.
        sign: Whether the codec must not move a value across zero.
        outside: Whether it is an input.
        image: Whether it is [B, C, H, W] of a convolution, so that a row of the codec is an image.
        rows: How it is seen as rows, some of which are left out; None if it is kept whole.
    """

    place: int
    mark: Mark | None
    order: tuple[int, ...] | None
    sign: bool
    outside: bool
    image: bool = False
    rows: Arrangement | None = None

    def codec_in(self, layer: nn.Module) -> Codec:
        """The codec of one layer."""
        codec = IDENTITY if self.mark is None else self.mark.codec_in(layer)
        codec = on_feature_maps(codec) if self.image else codec
        return codec.keeping_sign() if self.sign else codec

    def packer(self, codec: Codec) -> Callable[[Tensor], Record]:
        """What packs it through a codec, as it lies in memory, as a record."""
        if self.rows is not None:
            return self.rows.packer(codec)
        order = self.order
        return lambda x: Stored(codec, *codec.pack(x if order is None else x.permute(order)))

    @property
    def opened(self) -> Callable[[Any], Tensor]:
        """What opens it in backward."""
        return opened if self.rows is None and self.order is None else lambda x: self.back(opened(x))

    def back(self, x: Tensor) -> Tensor:
        """The tensor, of what is unpacked."""
        if self.rows is not None:
            return self.rows.back(x)
        return x if self.order is None else x.permute([self.order.index(i) for i in range(len(self.order))])


@dataclass(frozen=True)
class Others:
    """Which activations go through a layer's codec for what no patched module keeps.

    Attributes:
        inputs: The names of modules in a layer whose own codecs decide how what they are given is kept.
        all: The names of those that decide about all that they keep.
        attention: Whether attention in the layer's own code has a codec; else what it keeps stays as it is.
    """

    inputs: frozenset[str]
    all: frozenset[str]
    attention: bool

    def take(self, x: Node, halves: Halves, weights: set[Node]) -> bool:
        """Whether they take a kept tensor that no module has marked; `weights` are the nodes made of weights alone."""
        made, value = made_by(x), x.meta["val"]
        shape = [hint(value.size(i)) for i in OTHER.order(value) or range(value.dim())]
        if op_name(made) in _EXACT or not is_large(value.dtype, shape, _is_image(made)):
            return False
        if made.target is operator.getitem and made.args[1] != 0:
            # the statistics of an op
            return False
        inputs = halves.inputs
        if made in inputs and halves.grads[inputs.index(made)] is None:
            # whoever has made it holds it
            return False
        reader = module_reading(x)
        if reader in self.all or (reader in self.inputs and reader != running(made)):
            return False
        return made not in weights


def _is_image(made: Node) -> bool:
    """Whether a node makes [B, C, H, W], and is a convolution."""
    return made.target is aten.convolution.default and made.meta["val"].dim() == 4


def packed_in(
    halves: Halves,
    inputs: dict[Node, int],
    parameters: int,
    others: Others | None,
    sizes: TokenSizes | None,
    *,
    codecs: bool,
) -> Iterator[Packed]:
    """What is kept through a codec: that with which a module has marked it, or the layer's for all others.

    Without `codecs` nothing is. With `sizes`, rows are left out of all that has the batch's tokens, with a codec or
    without.
    """
    weights = made_of_these(halves.forward.graph, halves.inputs[:parameters])
    for i, x in enumerate(halves.kept):
        mark = codec_mark(x) if codecs else None
        if mark is None and codecs and others is not None and others.take(x, halves, weights):
            mark = OTHER
        elif mark is not None and not mark.module and others is not None and not others.attention:
            mark = None
        if mark is not None:
            image = mark == OTHER and _is_image(made_by(x))
            order = mark.order(x.meta["val"])
            rows = None if image or x in inputs else _rows_of(x, sizes, order)
            yield Packed(i, mark, order, is_of_a_relu(made_by(x)), x in inputs, image, rows)
        elif (rows := None if x in inputs else _rows_of(x, sizes, None)) is not None:
            yield Packed(i, None, None, sign=False, outside=False, rows=rows)


def _rows_of(x: Node, sizes: TokenSizes | None, order: tuple[int, ...] | None) -> Arrangement | None:
    value = x.meta["val"]
    if sizes is None or not isinstance(value, Tensor):
        return None
    return arrangement(value, sizes.axes(value), order or order_in_memory(value))
