"""A plan's graphs as a compiler takes them: functional, of its own ops, with seeds for draws, and with the codecs of
what is kept inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from ..compilation.policy import made_of
from ..private_apis.inductor import random_of, seed_on
from .draws import DRAWN, DROPPED
from .redraw import Certain, drawn_from, state_before

aten = torch.ops.aten
# what this package registers; other ops of its run code of its own, which no compiler sees
_OURS = "hf_actcompress"


class NotCompiled(Exception):
    """Why a plan is not compiled."""


def refuse_opaque(graph: Graph) -> None:
    """Raise NotCompiled if a graph has a node that no compiler sees into."""
    for node in graph.nodes:
        target: Any = node.target
        known = target in (DRAWN, DROPPED) or target is drawn_from or target is state_before
        if node.op == "call_function" and not known and getattr(target, "namespace", "") == _OURS:
            raise NotCompiled(f"it runs code that no compiler sees into ({target.__name__.partition('.')[0]})")
        if target is drawn_from and node.args[2] not in _OF_SEEDS:
            raise NotCompiled(f"it makes the numbers of {node.args[2]} again")


def with_results(owner: GraphModule, graph: Graph, results: Sequence[Node | None]) -> tuple[GraphModule, list[Node]]:
    """A copy of a graph that returns the results, which may be None, and the placeholders of which these are made."""
    needed = made_of([x for x in results if x is not None])
    made, copied = Graph(), dict[Node, Node]()
    for node in graph.nodes:
        if node in needed:
            copied[node] = made.node_copy(node, copied.__getitem__)
    made.output(tuple(None if x is None else copied[x] for x in results))
    return GraphModule(owner, made), [node for node in graph.nodes if node.op == "placeholder" and node in needed]


class Run(Interpreter):
    """Runs a graph while it is traced for a compiler.

    Args:
        module: The graph.
        made: Called with each node and its value, when it is made.
        opens: By the name of a placeholder: what makes its value, when it is read first.
    """

    def __init__(
        self,
        module: GraphModule,
        made: Callable[[Node, Any], None] = lambda node, value: None,
        opens: dict[str, Callable[[], Tensor]] | None = None,
    ) -> None:
        super().__init__(module)
        self._made, self._opens = made, opens or {}

    def run_node(self, n: Node) -> Any:
        if n.op != "output":
            for x in n.all_input_nodes:
                if x.name in self._opens:
                    self.env[x] = self._opens[x.name]()
                    del self._opens[x.name]
        value = super().run_node(n)
        self._made(n, value)
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


# ops that draw -> the same numbers' distribution, made of a seed
_OF_SEEDS: dict[Any, Callable[..., Any]] = {
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.p: _bernoulli,
    aten.rand_like.default: _like(False),
    aten.randn_like.default: _like(True),
    aten.rand.default: _sized(False),
    aten.randn.default: _sized(True),
}
