"""A plan's graphs as a compiler takes them: functional, of its own ops, and with seeds for draws."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..compilation.policy import is_attention
from ..private_apis.inductor import random_of, seed_on
from .batch_norms import updates_statistics
from .draws import DRAWN, DROPPED
from .redraw import Certain, drawn_from, is_drawn, state_before

aten = torch.ops.aten
# what this package registers: but for dropout, code that no compiler sees into
_OURS = "hf_actcompress"


def is_opaque(node: Node) -> bool:
    """Whether no compiler sees into a node: attention of other packages, quantised layers, draws without a formula."""
    target: Any = node.target
    if target is operator.getitem:
        return isinstance(node.args[0], Node) and is_opaque(node.args[0])
    if updates_statistics(node):
        # a compiler would not do it
        return True
    if target is drawn_from:
        return node.args[2] not in _OF_SEEDS
    if target is state_before:
        return any(user.target is drawn_from and is_opaque(user) for user in node.users)
    if is_drawn(node) and target is not DRAWN and not is_attention(node):
        return target not in _OF_SEEDS
    return target not in (DRAWN, DROPPED) and getattr(target, "namespace", "") == _OURS


def segment_module(owner: GraphModule, nodes: Sequence[Node], given: Sequence[Node], results: Sequence[Node]) -> Run:
    """Runs some nodes of a graph, of the values of `given`, and returns those of `results`."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    for x in given:
        copied[x] = graph.placeholder(x.name)
    for node in nodes:
        copied[node] = graph.node_copy(node, copied.__getitem__)
    graph.output(tuple(copied[x] for x in results))
    return Run(GraphModule(owner, graph), {copied[x].name: x for x in (*given, *nodes)})


class Run(Interpreter):
    """Runs a graph while it is traced for a compiler.

    Args:
        module: The graph.
        original: By the name of a node: the node that it is a copy of.

    Attributes:
        made: Called with each original node and its value, when it is made.
        opens: By original node: what makes the value of a placeholder, when it is first read.
    """

    def __init__(self, module: GraphModule, original: dict[str, Node]) -> None:
        super().__init__(module)
        self._original = original
        self.made: Callable[[Node, Any], None] = lambda node, value: None
        self.opens: dict[Node, Callable[[], Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        for x in n.all_input_nodes:
            opens = self.opens.pop(self._original[x.name], None)
            if opens is not None:
                self.env[x] = opens()
        value = super().run_node(n)
        if n.op != "output":
            self.made(self._original[n.name], value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is DRAWN:
            return seed_on(args[0].device)
        if target is DROPPED:
            return _dropped(*args)
        if target is state_before:
            return seed_on(args[0])
        if target is drawn_from:
            seed, _, op, *rest = args
            return _OF_SEEDS[op](seed, *rest, **kwargs)
        if target in _OF_SEEDS:
            # few numbers, which are kept
            place = args[0].device if isinstance(args[0], Tensor) else torch.device(kwargs.get("device") or "cpu")
            return _OF_SEEDS[target](seed_on(place), *args, **kwargs)
        return super().call_function(target.op if isinstance(target, Certain) else target, args, kwargs)


def _dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    return _native_dropout(seed, x, p)[0]


def _native_dropout(seed: Tensor, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    mask = random_of(seed, x.shape) > p
    # as torch's own decomposition for Inductor
    return mask * x * float(1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _bernoulli(seed: Tensor, x: Tensor, p: float, generator: Any = None) -> Tensor:
    return (random_of(seed, x.shape) < p).to(x.dtype)


def _like(normal: bool) -> Callable[..., Tensor]:
    def made(seed: Tensor, x: Tensor, **kwargs: Any) -> Tensor:
        return random_of(seed, x.shape, normal).to(kwargs.get("dtype") or x.dtype)

    return made


def _sized(normal: bool) -> Callable[..., Tensor]:
    def made(seed: Tensor, size: Sequence[Any], **kwargs: Any) -> Tensor:
        return random_of(seed, size, normal).to(kwargs.get("dtype") or torch.get_default_dtype())

    return made


# by op that draws: what draws from the same distribution, of a seed
_OF_SEEDS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.p: _bernoulli,
    aten.rand_like.default: _like(False),
    aten.randn_like.default: _like(True),
    aten.rand.default: _sized(False),
    aten.randn.default: _sized(True),
}
