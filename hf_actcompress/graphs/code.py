"""Straight-line Python code for a graph: one call after the other, each result dropped after its last reader."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..ops.kernel_nodes import NORMED, RSTD, rms_norm_parts
from ..ops.nodes import RUNS
from ..private_apis.graphs import binding
from ..reference import dropout_fwd, dropout_replay
from .compiled_run import Segment
from .draws import DRAWN, DROPPED
from .in_place import written_over
from .inside import PRODUCTS, is_in_cast, is_in_linear, narrow_sum
from .redraw import Certain, drawn_from, state_before

_INFIX = {operator.mul: "*", operator.add: "+", operator.sub: "-", operator.floordiv: "//", operator.mod: "%"}
aten = torch.ops.aten


class Pair(NamedTuple):
    """Two calls that one function makes.

    Attributes:
        first: The op of the first call, whose result the second one takes as its second argument.
        both: The function. It returns the second result and the first one.
        arguments: What it takes, of the arguments of both calls.
    """

    first: Any
    both: Callable[..., Any]
    arguments: Callable[[Any, Any], Any]


_PAIRS = {
    DROPPED: Pair(DRAWN, dropout_fwd, lambda first, second: second),
    NORMED: Pair(RSTD, rms_norm_parts, lambda first, second: first),
}
_WITH_NEXT = frozenset(pair.first for pair in _PAIRS.values())


class CodeWriter:
    """Writes the code of one graph.

    Args:
        graph: The graph.
        loads: What each placeholder is read from: the source text of an expression, which may be read once.
        results: What the code returns, of which nothing is written over.
    """

    def __init__(self, graph: Graph, loads: dict[Node, str], results: Iterable[Node]) -> None:
        self._loads = loads
        self._overwrites = written_over(graph, results)
        self._names: dict[Node, str] = {}
        kept = set(results)
        # nodes that are written inside of their readers' calls
        self._inside = {x for x in graph.nodes if x not in kept and (is_in_linear(x) or is_in_cast(x))}
        self._last = _last_readers(graph, self._inside)
        self.known: dict[str, Any] = {}
        self.lines: list[str] = []
        self._graph = graph

    def readers(self, x: Node) -> list[Node]:
        """The nodes whose calls read x."""
        users = [user for user in x.users if user.op == "call_function"]
        return [reader for user in users for reader in (self.readers(user) if user in self._inside else [user])]

    def constant(self, value: Any) -> str:
        """A name for an object in the code."""
        for name, known in self.known.items():
            if known is value:
                return name
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name

    def name(self, node: Node) -> str:
        """The variable of a node; a placeholder is read when it is first needed."""
        if node not in self._names:
            self._names[node] = f"v{len(self._names)}"
            if node.op == "placeholder":
                self.lines.append(f"{self._names[node]} = {self._loads[node]}")
            elif node.op == "get_attr":
                value = getattr(self._graph.owning_module, str(node.target))
                self.lines.append(f"{self._names[node]} = {self.constant(value)}")
        return self._names[node]

    def text(self, value: Any) -> str:
        """The source text of an argument."""
        if isinstance(value, Node):
            return self.name(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self.text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
        if isinstance(value, slice):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and abs(value) < float("inf")):
            return repr(value)
        return self.constant(value)

    def write(self, after: Callable[[Node], None] | None = None, needed: set[Node] | None = None) -> None:
        """Write all calls of the graph; `after` is called behind each."""
        calls = [x for x in self._graph.nodes if x.op == "call_function" and (needed is None or x in needed)]
        written = set(calls)
        for node in calls:
            if node in self._inside:
                continue
            pair = next((x for x in node.users if x in written and x.target in _PAIRS), None)
            if node.target in _WITH_NEXT and pair is not None:
                # what is made of it follows, and both are one call, behind which is freed what they read
                self._last.setdefault(pair, []).extend(self._last.pop(node, ()))
            else:
                self._call(node)
            if after is not None:
                after(node)
            dead = [self._names[x] for x in self._last.get(node, ()) if x in self._names]
            if dead:
                self.lines.append(f"{' = '.join(dead)} = None")

    def _call(self, node: Node) -> None:
        target: Any = node.target
        if target in _PAIRS and node.args[1].target is _PAIRS[target].first:  # type: ignore[union-attr]
            self._pair(node, _PAIRS[target])
            return
        if isinstance(target, Segment):
            self._segment(node)
            return
        if target in PRODUCTS and node.args[-1] in self._inside:
            *bias, x, weight = node.args
            self._linear(node, x, weight.args[0], bias)  # type: ignore[union-attr]
            return
        if target is aten._to_copy.default and node.args[0] in self._inside:
            self._narrow_sum(node, node.args[0])  # type: ignore[arg-type]
            return
        args = [self.text(x) for x in node.args]
        if target is drawn_from and node.args[0].target is state_before:  # type: ignore[union-attr]
            # the state was taken just before
            target, args = node.args[2], args[3:]
        if node in self._overwrites:
            target, place = self._overwrites[node]
            args.insert(0, args.pop(place))
        words = [f"{word}={self.text(x)}" for word, x in node.kwargs.items()]
        if target is operator.getitem:
            text = f"{args[0]}[{args[1]}]"
        elif target in _INFIX:
            text = f"{args[0]} {_INFIX[target]} {args[1]}"
        elif target is aten.sym_size.int:
            text = f"{args[0]}.size({args[1]})"
        else:
            text = f"{self.constant(direct(target))}({', '.join([*args, *words])})"
        self.lines.append(f"{self.name(node)} = {text}")

    def _linear(self, node: Node, x: Any, weight: Any, bias: Sequence[Any]) -> None:
        args = ", ".join(map(self.text, (x, weight, *bias)))
        self.lines.append(f"{self.name(node)} = {self.constant(binding(aten.linear.default))}({args})")

    def _narrow_sum(self, node: Node, total: Node) -> None:
        args = ", ".join(map(self.text, (*total.args, node.kwargs["dtype"], total in self._overwrites)))
        self.lines.append(f"{self.name(node)} = {self.constant(narrow_sum)}({args})")

    def _segment(self, node: Node) -> None:
        """A call that is given a list, so that it can free what nobody else reads."""
        self.lines.append(f"given = [{', '.join(map(self.text, node.args))}]")
        dead = [self._names[x] for x in self._last.pop(node, ()) if x in self._names]
        if dead:
            self.lines.append(f"{' = '.join(dead)} = None")
        self.lines.append(f"{self.name(node)} = {self.constant(node.target)}(given)")

    def _pair(self, node: Node, pair: Pair) -> None:
        x, first, *rest = node.args
        assert isinstance(first, Node)
        if first in self._names:
            # a second result of the same first one
            args = ", ".join(map(self.text, node.args))
            self.lines.append(f"{self.name(node)} = {self.constant(direct(node.target))}({args})")
            return
        # what the first call takes, and the second one beside its result
        args = ", ".join(map(self.text, pair.arguments(first.args, (x, *rest))))
        self.lines.append(f"{self.name(node)}, {self.name(first)} = {self.constant(pair.both)}({args})")

    def function(self, arguments: str, result: str) -> Callable[..., Any]:
        """The function that consists of the lines and returns the result."""
        lines = [*self.lines, f"return {result}"]
        source = f"def run({arguments}):\n    " + "\n    ".join(lines) + "\n"
        found: dict[str, Any] = dict(self.known)
        exec(compile(source, "<a layer's plan>", "exec"), found)  # noqa: S102
        run: Callable[..., Any] = found["run"]
        run.source = source  # type: ignore[attr-defined]
        return run


def _last_readers(graph: Graph, inside: set[Node]) -> dict[Node, list[Node]]:
    """The nodes that are read for the last time by each node; those `inside` of their readers read nothing there."""
    last: dict[Node, Node] = {}
    for node in graph.nodes:
        for x in () if node in inside else node.all_input_nodes:
            last[x] = node
            if x in inside:
                last.update(dict.fromkeys(x.all_input_nodes, node))
    found: dict[Node, list[Node]] = {}
    for x, reader in last.items():
        found.setdefault(reader, []).append(x)
    return found


def direct(target: Any) -> Any:
    """What costs the host least among functions that do the same."""
    if target is DROPPED:
        return dropout_replay
    if target is aten.view.default:
        # kernels do not always lay a result out in memory as tensors without data say
        return Tensor.reshape
    if target in RUNS:
        return RUNS[target]
    return binding(target.op if isinstance(target, Certain) else target)


def forward_code(
    graph: Graph,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    kept: Sequence[Node],
    packed: Sequence[Node] = (),
) -> Callable[..., Any]:
    """A function of the inputs that returns the outputs and what is kept in a tuple.

    With `packed` it takes a list of functions after the inputs, one for each of these kept nodes, which pack their
    values behind their last readers.
    """
    results = [*outputs, *kept]
    names = [f"x{i}" for i in range(len(inputs))]
    writer = CodeWriter(graph, dict(zip(inputs, names, strict=True)), results)
    due: dict[Node, list[Node]] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    for x in packed:
        due.setdefault(max(writer.readers(x), key=order.__getitem__, default=x), []).append(x)

    def after(node: Node) -> None:
        for x in due.get(node, ()):
            name = writer.name(x)
            alias = f"p{packed.index(x)}"
            writer.lines.append(f"{alias} = k[{packed.index(x)}]({name})")
            if x not in returned:
                writer.lines.append(f"{name} = None")

    returned = {*outputs, *(x for x in kept if x not in packed)}
    writer.write(after)
    texts = [*map(writer.text, outputs)]
    texts += [f"p{packed.index(x)}" if x in packed else writer.text(x) for x in kept]
    arguments = [*names, "k"] if packed else names
    return writer.function(", ".join(arguments), f"({', '.join(texts)},)")
