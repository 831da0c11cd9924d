"""Which sizes a graph for any sizes may be called with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from .trace import Joint


def layout(x: Tensor) -> Hashable:
    """How a tensor lies in memory, whatever its sizes: in which order, and along which dimensions it is repeated.

    A tensor with gaps has its strides, so that a graph is for its sizes alone.
    """
    if x.is_contiguous():
        return "contiguous"
    order = sorted((i for i in range(x.dim()) if x.stride(i)), key=lambda i: -x.stride()[i])
    dense = 1
    for i in reversed(order):
        if x.size(i) > 1 and x.stride(i) != dense:
            return x.stride()
        dense *= x.size(i)
    return tuple(order), tuple(i for i in range(x.dim()) if not x.stride(i))


class Sizes:
    """The sizes that the inputs of a graph for any sizes may have: what the trace has asked about them.

    Args:
        joint: The graph.
    """

    def __init__(self, joint: Joint) -> None:
        environment: Any = joint.mode.shape_env
        inputs = joint.inputs[joint.parameters :]
        self._sizes = [[_expression(environment, size) for size in x.shape] for x in inputs]
        self._environment, self._guards = environment, list[Any]()
        symbols = {s for sizes in self._sizes for size in sizes for s in getattr(size, "free_symbols", ())}
        self._ranges = {s: environment.var_to_range[s] for s in symbols}

    def allow(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs of these sizes take the same way through the code."""
        known: dict[Any, int] = {}
        for sizes, x in zip(self._sizes, inputs, strict=True):
            for size, n in zip(sizes, x.shape, strict=True):
                if getattr(size, "is_Symbol", False):
                    if known.setdefault(size, n) != n:
                        return False
                elif not getattr(size, "free_symbols", ()) and int(size) != n:
                    return False
        if not all(self._ranges[s].lower <= n <= self._ranges[s].upper for s, n in known.items()):
            return False
        computed = [
            (size, n)
            for sizes, x in zip(self._sizes, inputs, strict=True)
            for size, n in zip(sizes, x.shape, strict=True)
        ]
        if any(hasattr(size, "xreplace") and size.xreplace(known) != n for size, n in computed):
            return False
        return all(guard.xreplace(known) == True for guard in self._asked())  # noqa: E712  sympy's True

    def _asked(self) -> list[Any]:
        """What the trace has asked about the sizes, and a compiler since then."""
        if len(self._guards) != len(self._environment.guards):
            self._guards = [self._environment.simplify(guard.expr) for guard in self._environment.guards]
        return self._guards


def _expression(environment: Any, size: Any) -> Any:
    return size if isinstance(size, int) else environment.simplify(size.node.expr)
