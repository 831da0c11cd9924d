"""An operation, and the step that applies it to values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..codecs import IDENTITY, Codec
from .emit import Emitter


@dataclass(frozen=True)
class Operation:
    """One operation; its fields are its constants. The argument `b` of its methods is a `backward.Backward`.

    Attributes:
        again: Whether its first output is made again in backward instead of kept: pointwise functions and views are.
        multiplies: Whether it is a product of its first input and a weight, in the dtype of autocast.
        keeps: How many of its inputs, the first ones, go through its step's codec if they are kept.
        keeps_output: Whether its first output goes through that codec if it is kept.
        sums: Whether it is a sum, whose backward reads none of its inputs.
        same: Whether its output has no more content than its input, so that keeping the input instead costs nothing.
        differentiates: Whether its code runs autograd.
        by_rows: Whether it computes each row [C] of its activations by itself, whatever its constants are.
    """

    again: ClassVar[bool] = True
    same: ClassVar[bool] = False
    multiplies: ClassVar[bool] = False
    keeps: ClassVar[int] = 0
    keeps_output: ClassVar[bool] = False
    sums: ClassVar[bool] = False
    differentiates: ClassVar[bool] = False
    by_rows: ClassVar[bool] = False

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return False

    @property
    def works_by_rows(self) -> bool:
        """Whether it gives the same on rows [B * T, C] as on tokens [B, T, C]."""
        return self.by_rows

    @property
    def makes_rows(self) -> bool:
        """Whether it makes rows [B * T, C] of [B, T, C]."""
        return False

    def key(self) -> Hashable:
        """Equal for two operations that do the same."""
        return self

    def structure(self) -> Hashable:
        """The same as `key`, without the sizes of tensors."""
        return self.key()

    def rebuilds(self, index: int) -> bool:
        """Whether the output of that index is made again in backward."""
        return self.again and index == 0

    def codec_of(self, step: Step, value: int) -> Codec:
        """The codec of one of the inputs that are kept."""
        return step.codec

    def forward(self, e: Emitter, *ins: Any) -> Any:
        """Write the operation down: the node of its output, or a tuple of nodes."""
        raise NotImplementedError

    def repeat(self, e: Emitter, *ins: Any) -> Any:
        """The same as `forward` with the same bits, inside of a backward, where no autocast is on."""
        return self.forward(e, *ins)

    def rebuild(self, b: Any, step: Step) -> None:
        """Write down how the first output, and others that `rebuilds` names, are made again, with the same bits."""
        made = self.forward(b, *(None if x is None else b.want(x) for x in step.ins))
        for i, node in enumerate(made if isinstance(made, tuple) else (made,)):
            if i == 0 or self.rebuilds(i):
                b.values[step.outs[i]] = node

    def backward(self, b: Any, step: Step) -> None:
        """Write down the gradients of those inputs that want one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Step:
    """One operation on values, which are numbers. An input that is missing (a bias) is None.

    `module` is the name of the layer's module whose code this is, for reports; `codec` is the codec through which it
    keeps activations.
    """

    operation: Operation
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    module: str = field(default="", compare=False)
    codec: Codec = IDENTITY

    def key(self, sizes: bool = True) -> Hashable:
        """Equal for two steps that do the same; without sizes, perhaps with tensors of other sizes."""
        operation = self.operation.key() if sizes else (type(self.operation), self.operation.structure())
        return operation, self.ins, self.outs, self.codec

    @property
    def x(self) -> int:
        """The first input, which is never missing."""
        x = self.ins[0]
        assert x is not None
        return x

    @property
    def y(self) -> int:
        """The first output."""
        return self.outs[0]
