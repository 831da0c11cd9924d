"""Straight-line code for one direction of a program, written down as a `torch.fx` graph while its steps are walked.

A graph is made once for each setting in which the program is called: device, dtypes, autocast, wanted gradients. What
depends on these (casts, kernels, which gradients are computed) is decided here and costs a call nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from ..dispatch import implementation
from ..reference.table import FUNCTIONS
from .stages import Stops, stopping

# a setting has one of these as its choice in an estimate, where each call asks the rules of the estimated device; a CPU
# has no kernels
ESTIMATED, ESTIMATED_CPU = ESTIMATES = ("estimated", "estimated on a CPU")


@dataclass(frozen=True)
class CallSetting:
    """The conditions under which a program is called.

    Attributes:
        device: The device of all its tensors.
        autocast: The dtype to which autocast casts the inputs of products; None while it is off.
        choice: Which implementations are asked for: a choice of `dispatch`, or one of ESTIMATES.
        dtypes: The dtypes of the inputs, in order; None for an input that is None.
        needed: Which inputs want a gradient.
        stops: Where its backward stops for gradients of weights to be added up.
        kernel: The kernel of its attention, if it has one.
        fewer: Whether some rows of activations are not kept.
    """

    device: torch.device
    autocast: torch.dtype | None
    choice: str
    dtypes: tuple[torch.dtype | None, ...]
    needed: tuple[bool, ...]
    stops: Stops = ()
    kernel: str | None = None
    fewer: bool = False

    def autocasting(self, x: Tensor) -> torch.autocast:
        """The autocast of this setting, for code that reads x. Its cache, which is for cast weights, is off."""
        device = "cpu" if x.is_meta else self.device.type
        return torch.autocast(device, self.autocast, enabled=self.autocast is not None, cache_enabled=False)


class Emitter:
    """A graph in the making. Each node has a tensor without data beside it, for its shape and dtype.

    Attributes:
        values: The node of each value of the program that the graph has.
        rows: For each node [..., C] that is a view of a node [rows, C], the latter.
        sources: For each node that is a reshape of another node, the latter.
        tokens: A node [B, T, ...] that has the sizes of batch and tokens; None if there is none.
        picks: The node of the rows that are kept of activations; None if all are.
    """

    def __init__(self, setting: CallSetting) -> None:
        self.setting = setting
        self.graph = fx.Graph()
        self.values: dict[int, Node] = {}
        self.rows: dict[Node, Node] = {}
        self.sources: dict[Node, Node] = {}
        self.tokens: Node | None = None
        self.picks: Node | None = None
        self._meta: dict[Node, Any] = {}
        self._same: dict[tuple[Any, ...], Node] = {}

    def given(self, name: str, like: Any) -> Node:
        """An argument of the code."""
        node = self.graph.placeholder(name)
        self._meta[node] = like
        return node

    def take_sizes_of(self, tokens: Node) -> None:
        """Read the sizes of batch and tokens off a node [B, T, ...] now, so that it is not held until they are used."""
        self.tokens = tokens
        for dim in (0, 1):
            self.once(torch.Tensor.size, tokens, dim)

    def call(self, function: Callable[..., Any], *args: Any, like: Callable[..., Any] | None = None) -> Node:
        """Write a call ``function(*args)``; `like`, or else the function, gives its result on tensors without data."""
        node = self.graph.call_function(function, args)
        self._meta[node] = (like or function)(*fx.map_arg(args, self.meta))  # type: ignore[no-untyped-call]
        return node

    def once(self, function: Callable[..., Any], *args: Any) -> Node:
        """The same as `call`; if the function has been called with these arguments before, the node of that call."""
        key = (function, *args)
        if key not in self._same:
            self._same[key] = self.call(function, *args)
        return self._same[key]

    def dispatched(
        self, name: str, row: str | None, *args: Any, tail: tuple[Any, ...] = (), like: Callable[..., Any] | None = None
    ) -> Node:
        """The function `name` of `reference/` or its kernel, as `dispatch` chooses for the first of `args`.

        Args:
            tail: Further arguments that are no values of the graph and cannot be written as source text: functions.
            like: The same as in `call`; None for the reference.
        """
        stock = like or FUNCTIONS[name]
        if self.setting.choice in ESTIMATES:
            function: Callable[..., Any] = Chosen(name, row)
        else:
            sample = torch.empty(1, dtype=self.dtype(args[0]), device=self.setting.device)
            function = implementation(name, sample, row)
        if not tail:
            return self.call(function, *args, like=stock)
        return self.call(Bound(function, tail), *args, like=Bound(stock, tail))

    def is_reference(self, x: Node, row: str | None, *names: str) -> bool:
        """Whether these functions of `reference/` run for x, and no kernels: then they can share an intermediate."""
        if self.setting.choice in ESTIMATES:
            return self.setting.choice == ESTIMATED_CPU
        sample = torch.empty(1, dtype=self.dtype(x), device=self.setting.device)
        return all(implementation(name, sample, row) is FUNCTIONS[name] for name in names)

    def item(self, node: Node, index: int) -> Node:
        return self.once(operator.getitem, node, index)

    def cast(self, node: Node | None, dtype: torch.dtype | None) -> Any:
        """The node in that dtype, cast once; the node itself if it is None, or the dtype is None."""
        if node is None or dtype is None or self.dtype(node) == dtype:
            return node
        return self.once(torch.Tensor.to, node, dtype)

    def meta(self, node: Node) -> Any:
        """The tensor without data that stands for the node's value."""
        return self._meta[node]

    def dtype(self, node: Node) -> torch.dtype:
        dtype: torch.dtype = self._meta[node].dtype
        return dtype

    def code(self, results: Sequence[Node | None]) -> Callable[..., Any]:
        """The function that has been written down: from the given values, in order, to a tuple of the results."""
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code()
        if self.setting.stops:
            self.graph.on_generate_code(lambda known: stopping if known is None else known)
        return fx.GraphModule({}, self.graph).forward


class Chosen:
    """A function of `reference/` or its kernel, which `dispatch` chooses at each call."""

    def __init__(self, name: str, row: str | None) -> None:
        self.name, self.row = name, row
        self.__name__, self.__module__ = name, __name__

    def __call__(self, x: Any, *args: Any) -> Any:
        return implementation(self.name, x, self.row)(x, *args)


class Bound:
    """A function with its last arguments and with the name that `torch.fx` asks for, which a partial does not have."""

    def __init__(self, function: Any, tail: tuple[Any, ...] = ()) -> None:
        self.function, self.tail = function, tail
        # if `__module__` named torch, the generated code would look the function up there
        self.__name__, self.__module__ = getattr(function, "func", function).__name__, __name__

    def __call__(self, *args: Any) -> Any:
        return self.function(*args, *self.tail)


class UnderAutocast:
    """A function that runs under the autocast of a setting, whatever autocast is on when it is called."""

    def __init__(self, function: Callable[..., Any], setting: CallSetting) -> None:
        self.function, self.setting = function, setting
        self.__name__, self.__module__ = "under_autocast", __name__

    def __call__(self, x: Tensor, *others: Any) -> Any:
        with self.setting.autocasting(x):
            return self.function(x, *others)
