"""The protocol of a codec, and the static data that every codec keeps beside the packed tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import CodecError
from ..reference.rng import Generators

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Codec(Protocol):
    """What a codec must offer. `unpack(*pack(x))` has x's shape and dtype.

    A codec is a frozen dataclass (equal means the same format). It knows neither autograd nor ctx, reads nothing back
    to the host, and the shapes of what it returns follow from x's shape and dtype alone. A codec that
    draws random numbers has generators of its own (reference/rng.py), so that dropout draws as in the stock model.
    """

    @property
    def lossless(self) -> bool:
        """Whether `unpack(*pack(x))` equals x bit by bit."""
        return False

    @property
    def linear_only(self) -> bool:
        """Whether it only serves the sum over tokens of a linear's weight gradient, so only the field `linear`."""
        return False

    @property
    def for_images(self) -> bool:
        """Whether it stores feature maps [..., H, W], the inputs of convolutions, and not features of tokens."""
        return False

    @property
    def along_tokens(self) -> bool:
        """Whether neighbours along the axis before the last are stored together: they must be tokens, and not heads."""
        return False

    @property
    def heads_apart(self) -> bool:
        """Whether each head has a range of its own: it has to get heads as [..., H, D]."""
        return False

    @property
    def takes_rows(self) -> bool:
        """Whether it stores each row by itself, so that it can be given any number of rows of any sequences."""
        return False

    @property
    def mixes_rows(self) -> bool:
        """Whether it stores neighbouring rows of a sequence as one, so that `pack_real` has to know which are real."""
        return False

    @property
    def bits(self) -> int | None:
        """Bits per element; None if the codec does not round all elements to the same number of bits."""
        return None

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        """Encode x, of any shape: the tensors to keep, and static Python data (shape, dtype)."""
        ...

    def pack_real(self, x: Tensor, real: Tensor) -> tuple[tuple[Tensor, ...], object]:
        """The same for x [..., T, C] of whose rows those are real that are True in `real`, bool [..., T]."""
        return self.pack(x)

    def on_feature_maps(self) -> Codec | None:
        """The codec of the same method for feature maps [B, C, H, W]; None: this one, with each image as one row."""
        return None

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        """Decode what `pack` returned into a tensor of x's shape and dtype."""
        ...

    def has_grad_weight(self, dy: Tensor) -> bool:
        """Whether `grad_weight` may return a gradient for such a dy. `Offload` asks before it fetches the tensors."""
        return type(self).grad_weight is not Codec.grad_weight

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        """dW [O, I] = dy^T x, dy [..., O], out of the packed x [..., I] where that is cheaper than unpacking.

        It returns None if that is not cheaper: then x is unpacked and multiplied.
        """
        return None

    def drawing_from(self, generators: Generators) -> Codec:
        """A codec equal to this one that draws from a model's generators. A codec that draws nothing returns itself."""
        return self

    @property
    def row(self) -> Codec:
        """The codec of the table that `used_in` has made this one of."""
        return self

    def used_in(self, module: str, role: str) -> Codec:
        """A codec for the module of that name, if the codec learns something there in training; else itself. Its
        `row` is equal to this codec.

        Called after `drawing_from`: what is learnt belongs to the model, as its generators do.
        """
        return self

    def part(self, name: str, heads: bool = False) -> Codec:
        """The codec for one of several tensors of a module, if it learns something of each; else itself.

        `heads` says that the tensor is made of heads. A codec that returns one with `heads_apart` gets [..., H, D].
        """
        return self

    def keeping_sign(self) -> Codec:
        """The same format, in which decoded values are above zero where x is. A codec that cannot do so returns itself.

        This is for the input of a ReLU, whose sign decides whether a gradient passes.
        """
        return self

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes of the tensors that `pack` returns for an x of that shape and dtype."""
        ...


@dataclass(frozen=True)
class TensorMeta:
    """The static half of a packed tensor."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorMeta:
        """Raises CodecError if x is not of a dtype that activations have."""
        if x.dtype not in DTYPES:
            raise CodecError(f"a lossy codec stores {', '.join(map(str, DTYPES))}; asked to store {x.dtype}")
        return cls(x.shape, x.dtype)

    @property
    def features(self) -> int:
        """Size of the last axis; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """How many vectors of `features` elements there are."""
        return self.shape[:-1].numel() if self.shape else 1


def meta_of(meta: object) -> TensorMeta:
    assert isinstance(meta, TensorMeta)
    return meta


def check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"the kept fraction lies in (0, 1]; found {fraction}")


def kept(fraction: float, count: int) -> int:
    """How many of `count` elements a codec keeps: the fraction of them, rounded, and at least one unless count is 0."""
    return min(count, max(1, math.floor(fraction * count + 0.5)))
