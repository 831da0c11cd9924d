"""The code of a program's backward, which is written step by step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..codecs import IDENTITY, Codec
from .computation import Computation
from .emit import Emitter
from .keeping import Packing, opened, plus, popped, unpacked
from .left_out import ROWS, TOKENS_FIRST, picked, restored, seen_as
from .stages import handed_over
from .step import Step


class Backward(Emitter):
    """The graph of a backward, while the steps are walked from the last one to the first.

    Its code takes one list, which it empties from the end: what is kept, in reverse order of first use, then the
    gradients of the outputs, in reverse order, too.

    Args:
        forward: The graph of the forward.
        program: The program.
        wanted: The values that want a gradient.
        inputs: The number of all inputs; 0: the code takes the values themselves, even where they are kept packed.
        sums: Sums that are made again, because everything that they are made from is kept anyway.
    """

    def __init__(
        self,
        forward: Emitter,
        program: Computation,
        wanted: frozenset[int],
        inputs: int = 0,
        sums: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(forward.setting)
        self._sums = sums
        self._inputs = inputs
        self._layouts = program.layouts if self.setting.fewer else {}
        # for each value that is kept through a codec, the node of the forward that makes its record
        self.packed: dict[int, Node] = {}
        self.wanted = wanted
        self._steps = program.steps
        # for each value that is kept in a narrower dtype, the number under which it is kept
        self.casts: dict[int, int] = {}
        self._wide: dict[int, int] = {}
        self.kept: list[int] = []
        # for each value, the module of the first step whose backward reads it
        self.readers: dict[int, str] = {}
        self.module = ""
        # for each output that was made again, those intermediate nodes that the step's backward reads, too
        self.shared: dict[int, tuple[Node, ...]] = {}
        self._saved = self.given("saved", None)
        # what brings back the rows that were left out
        self._spread = self.popped(None) if self.setting.fewer and inputs else None
        self._box = self.given("box", None) if self.setting.stops and inputs else None
        self.gradients: dict[int, Node] = {}
        # gradients that may be None when the code runs
        self.optional: set[Node] = set()
        self._forward, self._weights = forward, program.weights
        self._maker = {value: step for step in program.steps for value in step.outs}
        # value of an activation [B, T, C] -> value of its view as rows [B * T, C], which the steps read
        self._rows = {step.x: step.y for step in program.steps if step.operation.makes_rows}
        self._tokens = {rows: value for value, rows in self._rows.items()}

    def want(self, value: int) -> Node:
        """The node of a value of the forward: kept, or made again right before its first use."""
        self.readers[self._tokens.get(value, value)] = self.module
        node = self.values.get(value)
        if node is None:
            self._have(value)
            node = self.values[value]
        return node

    def want_in(self, value: int, dtype: torch.dtype) -> Node:
        """The same in the dtype of a product. A value that only products read is kept in that dtype if narrower."""
        narrow = dtype.itemsize < self.dtype_of(value).itemsize
        narrow = narrow and self.codec_of(value) == IDENTITY
        if narrow and value not in self.values and self._is_for_products(value):
            return self.want(self._narrow(value, dtype))
        node: Node = self.cast(self.want(value), dtype)
        return node

    def _narrow(self, value: int, dtype: torch.dtype) -> int:
        """The value in a narrower dtype, as a further value of the forward."""
        cast = self._forward.cast(self._forward.values[value], dtype)
        at = self.casts.setdefault(value, max(self._forward.values) + 1)
        self._forward.values[at] = cast
        self._wide[at] = value
        return at

    def want_itself(self, value: int, dtype: torch.dtype) -> Node:
        """The node of a value in that dtype, kept even if it could be made again, which would take more time."""
        if dtype != self.dtype_of(value):
            value = self._narrow(value, dtype)
        self.readers[value] = self.module
        if value not in self.values:
            self._keep(value)
        return self.values[value]

    def is_given(self, value: int) -> bool:
        """Whether the forward has this value: an input may be None."""
        return value in self._forward.values

    def _keep(self, value: int) -> None:
        self.kept.append(value)
        node = self._forward.values[value]
        like = self._forward.meta(node)
        found = self.popped(like)
        outside = value < self._inputs and value not in self._weights
        codec, swapped = (IDENTITY, False) if outside or not self._inputs else self._codec(value)
        layout = None if outside else self._layouts.get(self.wide(value))
        if layout is not None:
            self.values[value] = self._restored(value, found, layout, codec)
            return
        if codec != IDENTITY:
            self.packed[value] = self._behind(node, Packing(codec, swapped))
        if outside or codec != IDENTITY:
            function = opened if outside else unpacked
            found = self.call(function, found, like=lambda _: like.transpose(1, 2) if swapped else like)
        self.values[value] = self.call(torch.transpose, found, 1, 2) if swapped else found

    def _restored(self, value: int, found: Node, layout: str, codec: Codec) -> Node:
        """The node of a value of which only some rows are kept, perhaps through a codec."""
        node = self._forward.values[value]
        like = self._forward.meta(node)
        if layout == ROWS and len(like) == len(self._forward.meta(self._forward.values[0])):
            # recorded as rows, and computed as tokens where the layer is cut at its attention
            layout = TOKENS_FIRST
        if self._spread is None:
            return seen_as(self, found, layout, like)
        few = self._behind(node, picked, self._forward.picks, layout)
        if codec != IDENTITY:
            few = self._behind(few, Packing(codec, False))
            found = self.call(unpacked, found, like=lambda _: like)
        self.packed[value] = few
        return self.call(restored, found, self._spread, layout, like=lambda *_: like)

    def _behind(self, node: Node, function: Callable[..., Any], *args: Any) -> Node:
        """The node of a call ``function(node, *args)`` in the forward, right behind that node."""
        with self._forward.graph.inserting_after(node):
            return self._forward.call(function, node, *args, like=lambda *_: None)

    def place_of_own(self, value: int) -> int | None:
        """Where a value is kept that is a weight or was made by the program; None for others."""
        own = value >= self._inputs or value in self._weights
        return self.kept.index(value) if own and value in self.kept else None

    def codec_of(self, value: int) -> Codec:
        """Through which codec a value is kept: that of the first step that keeps it."""
        return self._codec(value)[0]

    def _codec(self, value: int) -> tuple[Codec, bool]:
        """The same, and whether the value is packed in the order of its memory, as attention's output is."""
        value = self.wide(value)
        value = self._rows.get(value, value)
        for step in self._steps:
            if step.codec == IDENTITY:
                continue
            if value in step.outs[:1] and step.operation.keeps_output:
                return step.codec, True
            if value in step.ins[: step.operation.keeps] and self.wants(step.y):
                return step.operation.codec_of(step, value), False
        return IDENTITY, False

    def _is_for_products(self, value: int) -> bool:
        """Whether a value would be kept, and only products read it (and sums, whose backward does not)."""
        step = self._maker.get(value)
        if step is None or step.operation.makes_rows:
            # an input that wants a gradient was made by an op, which may have declared how to recompute it
            kept = value not in self.wanted
        else:
            kept = not (self._rebuilds(value) and self._pays(step, value))
        if not kept:
            return False
        readers = [reader for reader in self.read_by(value) if not reader.operation.sums]
        return all(reader.operation.multiplies and reader.ins[0] == value for reader in readers)

    def wide(self, value: int) -> int:
        """The value that a kept one stands for: the wide value, if what is kept is its cast to a narrower dtype."""
        return self._wide.get(value, value)

    def read_by(self, value: int) -> list[Step]:
        return [step for step in self._steps if value in step.ins]

    def _have(self, value: int) -> None:
        step = self._maker.get(value)
        if step is None or not self._rebuilds(value) or not self._pays(step, value):
            self._keep(value)
        else:
            step.operation.rebuild(self, step)

    def _rebuilds(self, value: int) -> bool:
        """Whether a value that a step has made can be made again in backward."""
        step = self._maker[value]
        return value in self._sums or step.operation.rebuilds(step.outs.index(value))

    def popped(self, like: Any) -> Node:
        """The node of the next item that the code takes off its list."""
        return self.call(popped, self._saved, like=lambda _: like)

    def _pays(self, step: Step, value: int) -> bool:
        """Whether to make a value again rather than to keep it.

        A value without a gradient is kept: that is one tensor, while its sources would be kept for it alone. A view or
        a cast to a wider dtype is made again even then, because its source takes no more memory.
        """
        if step.operation.same and (
            self._is_narrower_than_what_is_kept(step, value) or self._is_packed_alone(step, value)
        ):
            return False
        if value in self.wanted or all(x is None or x in self._weights for x in step.ins):
            return True
        return step.operation.same and self._bytes(step.x) <= self._bytes(value)

    def _is_narrower_than_what_is_kept(self, step: Step, value: int) -> bool:
        """Whether the source of a cast would be kept for the cast alone, and takes more memory than the cast."""
        source = step.x
        kept = source in self._maker and not self._rebuilds(source)
        alone = source not in self.values and self.read_by(source) == [step]
        return kept and alone and self._bytes(value) < self._bytes(source)

    def _is_packed_alone(self, step: Step, value: int) -> bool:
        """Whether a view is kept through a codec, while its source would be kept without one."""
        if not self._inputs or self.codec_of(value) == IDENTITY:
            return False
        source = step.x
        kept = source in self._maker and not self._rebuilds(source)
        return kept and source not in self.values and self.codec_of(source) == IDENTITY

    def _bytes(self, value: int) -> int:
        return int(self._forward.meta(self._forward.values[value]).itemsize)

    def dy(self, step: Step, index: int = 0) -> Node:
        """The gradient of a value that the step has made."""
        return self.gradients[step.outs[index]]

    def wants(self, value: int | None) -> bool:
        return value is not None and value in self.wanted

    def dtype_of(self, value: int) -> torch.dtype:
        """The dtype of a value of the forward."""
        return self._forward.dtype(self._forward.values[value])

    def shape_of(self, value: int) -> torch.Size:
        """The shape of a value of the forward, with the recorded sizes of batch and tokens."""
        shape: torch.Size = self._forward.meta(self._forward.values[value]).shape
        return shape

    def empty(self, values: Sequence[int]) -> tuple[Tensor, ...]:
        """A tensor without data for each of these values of the forward."""
        return tuple(torch.empty(self.shape_of(x), dtype=self.dtype_of(x), device="meta") for x in values)

    def stop(self, weights: Sequence[int]) -> None:
        """Hand over the gradients of weights, and stop until they have been added up."""
        done = [self.gradients.pop(weight, None) for weight in weights]
        self.call(handed_over, self._box, *done, like=lambda *_: None)

    def give(self, value: int | None, gradient: Node) -> None:
        """Add to a value's gradient, in the order of autograd's engine: the gradient of the last reader comes first."""
        if value is None or value not in self.wanted:
            return
        gradient = self.cast(gradient, self.dtype_of(value))
        known = self.gradients.get(value)
        if known is not None:
            gradient = self.call(plus if known in self.optional else operator.add, known, gradient)
        self.gradients[value] = gradient

    def give_each(self, values: Sequence[int | None], found: Node) -> None:
        """Add to the gradients of those values that want one; `found` is a tuple with one for each value."""
        for i, value in enumerate(values):
            if self.wants(value):
                self.give(value, self.item(found, i))
