"""Random numbers in a graph: a draw is split into the generator's state, which is kept, and the numbers made from it.

Dropout that a layer's own code calls is two ops already (`draws`). This is for draws inside of torch's functions, such
as dropout in attention, and for noise that a model adds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..compilation.policy import is_attention, nbytes
from ..reference import replayed_rng, rng_state
from .draws import DRAWN


@cache
def state_bytes(device: str) -> int:
    """The bytes of the state of a generator. What is drawn is kept itself if it has no more."""
    return torch.Generator(device).get_state().numel()


def state_before(device: torch.device) -> Tensor:
    """In a graph: the state of a device's default generator."""
    return rng_state(device)


def drawn_from(state: Tensor, place: torch.device, op: Any, /, *args: Any, **kwargs: Any) -> Any:
    """In a graph: what a random op gives from a state. In a forward the generator is in this state and goes on."""
    with replayed_rng(state, place):
        return op(*args, **kwargs)


def is_drawn(node: Node) -> bool:
    """Whether a node draws: a state (`DRAWN`), or few numbers, which are kept themselves."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class Certain:
    """An op that torch tags as random, in a call in which it draws nothing."""

    def __init__(self, op: Any) -> None:
        self.op, self.overloadpacket, self._schema = op, op.overloadpacket, op._schema
        self.__name__, self.__module__ = op.overloadpacket.__name__, __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def __str__(self) -> str:
        return str(self.op)


def split_draws(graph: Graph, attention: bool) -> None:
    """Split each random op of a functional graph in two.

    A fused attention returns the seed of its dropout, which its backward reads. It is split only with `attention`: if
    it runs again.
    """
    for node in list(graph.nodes):
        if not is_drawn(node) or node.target is DRAWN:
            continue
        if _drops_nothing(node):
            node.target = Certain(node.target)
            continue
        if is_attention(node) and not attention:
            continue
        value = node.meta["val"]
        first = value[0] if isinstance(value, (tuple, list)) else value
        if first is value and nbytes(node) <= state_bytes(first.device.type):
            continue
        with graph.inserting_before(node):
            state = graph.call_function(state_before, (first.device,))
            made = graph.call_function(drawn_from, (state, first.device, node.target, *node.args), node.kwargs)
        # its size is not known before the draw, and is no matter
        with first.fake_mode:
            state.meta["val"] = torch.empty(16, dtype=torch.uint8)
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def has_unread_draws(graph: Graph) -> bool:
    """Whether numbers are drawn that nobody reads: divided, the graph would not draw them."""
    return any(is_drawn(node) and not node.users and not _drops_nothing(node) for node in graph.nodes)


def _drops_nothing(node: Node) -> bool:
    """Whether it is an attention without dropout, which torch tags as random, too."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" in names and not given.get("dropout_p")
