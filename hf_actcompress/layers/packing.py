"""What a plan keeps through codecs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..codecs import Codec
from ..codecs.feature_maps import on_feature_maps
from ..compilation.attribution import module_reading, running
from ..compilation.packing import is_of_a_relu
from ..compilation.policy import hint, made_by, op_name
from ..records import Stored
from ..records.activations import is_large
from .codec_marks import OTHER, Mark, codec_mark
from .divide import Halves
from .keeping import opened
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
    """

    place: int
    mark: Mark
    order: tuple[int, ...] | None
    sign: bool
    outside: bool
    image: bool = False

    def codec_in(self, layer: nn.Module) -> Codec:
        """The codec of one layer."""
        codec = self.mark.codec_in(layer)
        codec = on_feature_maps(codec) if self.image else codec
        return codec.keeping_sign() if self.sign else codec


class Packer:
    """Packs an activation through a codec, as a record."""

    def __init__(self, codec: Codec, order: tuple[int, ...] | None) -> None:
        self._codec, self._order = codec, order

    def __call__(self, x: Tensor) -> Stored:
        """The record of x, packed as it lies in memory."""
        return Stored(self._codec, *self._codec.pack(x if self._order is None else x.permute(self._order)))


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


def packed_in(halves: Halves, inputs: dict[Node, int], parameters: int, others: Others | None) -> Iterator[Packed]:
    """What is kept through a codec: that with which a module has marked it, or the layer's for all others."""
    weights = made_of_these(halves.forward.graph, halves.inputs[:parameters])
    for i, x in enumerate(halves.kept):
        mark = codec_mark(x)
        if mark is None and others is not None and others.take(x, halves, weights):
            mark = OTHER
        elif mark is not None and not mark.module and others is not None and not others.attention:
            mark = None
        if mark is not None:
            image = mark == OTHER and _is_image(made_by(x))
            yield Packed(i, mark, mark.order(x.meta["val"]), is_of_a_relu(made_by(x)), x in inputs, image)


def opening(packed: Packed) -> Callable[[Any], Tensor]:
    """What opens a packed tensor in backward."""
    if packed.order is None:
        return opened
    back = [packed.order.index(i) for i in range(len(packed.order))]
    return lambda x: opened(x).permute(back)
