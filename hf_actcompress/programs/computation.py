"""What a program computes, before any code is written down for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from .step import Step


@dataclass
class Computation:
    """Steps over numbered values. Inputs are the first values.

    Attributes:
        steps: In order.
        metas: For each input a tensor without data, which has its shape; None for an input that is None.
        weights: Which inputs are parameters.
        outputs: The values that are returned. An input among them is returned as it is: the gradient from its readers
            behind the program then comes first in the sum of its gradients, as in autograd's engine.
        optional: The outputs whose gradient may be None in some backward.
        layouts: For each activation, which dimensions hold its tokens: a layout of `left_out`.
        lossless: Whether the layer keeps all activations as they are, none through a codec.
    """

    steps: tuple[Step, ...]
    metas: tuple[Tensor | None, ...]
    weights: frozenset[int]
    outputs: tuple[int, ...]
    optional: frozenset[int] = frozenset()
    layouts: dict[int, str] = field(default_factory=dict)
    lossless: bool = True

    @cached_property
    def first_readers(self) -> dict[int, int]:
        """For each weight the first step that reads it. When that step's backward has run, its gradient is done."""
        readers: dict[int, int] = {}
        for i, step in enumerate(self.steps):
            for value in self.weights.intersection(step.ins):
                readers.setdefault(value, i)
        return readers

    @cached_property
    def elements(self) -> int:
        """The number of elements of all weights together."""
        return sum(meta.numel() for weight in self.weights if (meta := self.metas[weight]) is not None)

    @cached_property
    def order(self) -> tuple[tuple[int, ...], ...]:
        """The weights whose gradients are done together, in the order of the backward."""
        done: dict[int, tuple[int, ...]] = {}
        for weight, i in self.first_readers.items():
            done[i] = (*done.get(i, ()), weight)
        return tuple(done[i] for i in sorted(done, reverse=True))

    def inputs_of(self, value: int) -> frozenset[int]:
        """The inputs on which a value depends."""
        found = {value}
        for step in reversed(self.steps):
            if found.intersection(step.outs):
                found.update(x for x in step.ins if x is not None)
        return frozenset(x for x in found if x < len(self.metas))
