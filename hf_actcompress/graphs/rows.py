"""Which dimensions of a kept tensor are the tokens of the batch, so that the rows of some tokens can be left out.

The graph is traced for any sizes. The batch and the length are symbols then, and the shape of each tensor says where
its tokens are: ``[B, S, ...]``, ``[B, H, S, D]`` or, flattened, ``[B * S, ...]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..codecs import Codec
from ..ops.heads import seen_by_real
from ..records import Padding, Record, keep, rows_in_force
from .trace import Joint, NotTraced

# the dimensions of tokens: (batch, length), one for both, or none
Axes = tuple[int, ...]


class TokenSizes:
    """The sizes of batch and length in a graph.

    Args:
        joint: The graph, for any sizes. Its first floating-point tensor that is no weight is the hidden states,
            [B, S, ...]; if there is none, its first tensor is indices, [B, S].
        padding: Whether the rows that are left out come back as zeros; else as the rows that they repeat.

    Raises:
        NotTraced: One of them is a number in the graph.
    """

    def __init__(self, joint: Joint, padding: bool) -> None:
        self.padding = padding
        given = joint.inputs[joint.parameters :]
        hidden = next((x for x in given if x.is_floating_point()), given[0])
        self._environment: Any = joint.mode.shape_env
        self._batch, self._length = map(self._expression, hidden.shape[:2])
        if not all(getattr(size, "is_Symbol", False) for size in (self._batch, self._length)):
            raise NotTraced("rows of it are left out, and its graph is for one size of the batch")
        if self._batch == self._length:
            raise NotTraced("rows of it are left out, and the batch is as large as the sequences are long")

    def _expression(self, size: Any) -> Any:
        return size if isinstance(size, int) else self._environment.simplify(size.node.expr)

    def of(self, x: Tensor) -> list[Any]:
        """The sizes of x. Equal ones are equal, whatever the tensors are that they came from."""
        return list(map(self._expression, x.shape))

    def axes(self, x: Tensor) -> Axes | None:
        """The dimensions of the tokens in x; None if x depends on the number of tokens in another way."""
        places: dict[str, list[int]] = {"batch": [], "length": [], "both": []}
        for i, size in enumerate(self.of(x)):
            if size == self._batch * self._length:
                places["both"].append(i)
            elif size == self._batch:
                places["batch"].append(i)
            elif size == self._length:
                places["length"].append(i)
            elif {self._batch, self._length} & getattr(size, "free_symbols", set()):
                return None
        found = tuple(i for of in places.values() for i in of)
        whole = list(map(len, places.values()))
        return found if whole in ([0, 0, 0], [1, 1, 0], [0, 0, 1]) else None


@dataclass(frozen=True)
class Arrangement:
    """How a tensor is seen as ``[B, S, ...]``.

    Attributes:
        order: Its dimensions in that order; None for ``[B * S, ...]``.
    """

    order: tuple[int, ...] | None

    def tokens(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """x as [B, S, ...]; `sizes` are B and S."""
        return x.reshape(*sizes, *x.shape[1:]) if self.order is None else x.permute(self.order)

    def back(self, tokens: Tensor) -> Tensor:
        """The tensor again."""
        if self.order is None:
            return tokens.flatten(0, 1)
        return tokens.permute([self.order.index(i) for i in range(len(self.order))])

    def packer(self, codec: Codec) -> Callable[[Tensor], Record]:
        """What packs the rows that are kept."""

        def pack(x: Tensor) -> Record:
            return keep(self.tokens(x, rows_in_force().shape), codec)

        return pack


def arrangement(x: Tensor, axes: Axes | None, order: Sequence[int]) -> Arrangement | None:
    """How the rows of a kept tensor can be left out; None if it is kept whole.

    Args:
        x: The tensor.
        axes: Its dimensions of tokens.
        order: Its dimensions in the order in which they lie in memory.
    """
    if not axes or x.dim() <= len(axes) or (len(axes) == 1 and axes != (0,)):
        return None
    return Arrangement(None if len(axes) == 1 else (*axes, *(i for i in order if i not in axes)))


@dataclass(frozen=True)
class LeftOut:
    """What a plan that leaves rows out checks.

    Attributes:
        graded: The outputs that have a gradient, by place, and the dimensions of the tokens in each.
        masks: The inputs that are masks of attention, by place; None for attention that is causal and has none.
    """

    graded: tuple[tuple[int, Axes], ...]
    masks: tuple[int | None, ...]

    def checks(self, rows: Any, inputs: Sequence[Tensor]) -> Checks | None:
        """The checks of one call."""
        if not isinstance(rows, Padding):
            # records of rows that are kept once check themselves
            return None
        seen = [seen_by_real(rows, None if i is None else inputs[i]) for i in dict.fromkeys(self.masks)]
        return Checks(rows, seen, self.graded)


class Checks:
    """What the backward of a layer without padding has to find: zeros in the gradients of the rows left out.

    Args:
        padding: The padding.
        seen: For each mask [], bool: whether a real token attends to padding.
        graded: The outputs whose gradients are looked at, by place, and the dimensions of the tokens in each.
    """

    def __init__(self, padding: Padding, seen: list[Tensor], graded: tuple[tuple[int, Axes], ...]) -> None:
        self._guard, self._seen, self._graded = padding.guard, seen, graded
        self._padding = padding

    def look(self, grads: Sequence[Tensor | None]) -> None:
        """Note what must be zero. An error is raised at the end of a backward in which it was not."""
        for seen in self._seen:
            self._guard.note_attention(seen)
        total = self._padding.mask.numel()
        for i, axes in self._graded:
            if (dy := grads[i]) is not None:
                self._guard.note_gradient(
                    dy.movedim(axes, (0, 1)), self._padding.order(dy.device)[self._padding.real :], total
                )
