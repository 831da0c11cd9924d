"""The order of a backward's calls: where another one needs less memory at its peak, that one is taken.

Autograd's order computes the gradient of a weight as soon as it can, while all that an activation's derivative needs is
alive. If a call that frees as much as it makes comes first, less is alive then. No value depends on the order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch.fx import Graph, Node

from ..compilation.policy import is_pointwise, made_by, nbytes

# the part of the peak that another order may have
_CLEARLY = 0.95


def lower_peak(graph: Graph, owned: Collection[Node]) -> None:
    """Order the calls of a backward anew, if that lowers the peak of what is alive.

    Args:
        graph: The graph; it is changed in place.
        owned: The placeholders that are freed after their last reader. The others are alive in any case.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    memory = _Memory(calls, owned)
    other = list(_in_order_of_memory(calls, memory))
    # weights' gradients, which autograd adds up in the meantime, are not known here: a small gain may be none
    if memory.peak(other) < _CLEARLY * memory.peak(calls):
        end = graph.output_node()
        for node in other:
            # behind all placeholders, some of which may stand between calls
            end.prepend(node)


class _Memory:
    """What calls make and free, in bytes. A view belongs to the tensor that it shows."""

    def __init__(self, calls: Sequence[Node], owned: Collection[Node]) -> None:
        # for each tensor, how many calls read it or a view of it
        self._readers: dict[Node, int] = {}
        self._reads = {node: {made_by(x) for x in node.all_input_nodes} - {made_by(node)} for node in calls}
        self._sizes = {node: _size(node) for node in [*calls, *owned]}
        for reads in self._reads.values():
            for x in reads:
                self._readers[x] = self._readers.get(x, 0) + 1
        for x in [made_by(node) for node in calls if any(user.op == "output" for user in node.users)]:
            self._readers[x] = self._readers.get(x, 0) + 1

    def change(self, node: Node, left: dict[Node, int]) -> int:
        """By how much a call changes what is alive, if `left` readers are left of each tensor."""
        freed = sum(self._sizes.get(x, 0) for x in self._reads[node] if left[x] == 1)
        return self._sizes[node] - freed

    def left(self) -> dict[Node, int]:
        """How many readers each tensor has before the first call."""
        return dict(self._readers)

    def run(self, node: Node, left: dict[Node, int]) -> None:
        """Note that a call has run."""
        for x in self._reads[node]:
            left[x] -= 1

    def _writes_over(self, node: Node, left: dict[Node, int]) -> bool:
        """Whether a call can write into a tensor that it is the last one to read (`in_place`)."""
        dying = [x for x in self._reads[node] if left[x] == 1 and x.op == "call_function"]
        return is_pointwise(node) and any(self._sizes[x] == self._sizes[node] for x in dying)

    def peak(self, calls: Sequence[Node]) -> int:
        """The most that is alive while the calls run in this order, beyond what is alive before."""
        left, alive, highest = self.left(), 0, 0
        for node in calls:
            highest = max(highest, alive + (0 if self._writes_over(node, left) else self._sizes[node]))
            alive += self.change(node, left)
            self.run(node, left)
        return highest


def _size(node: Node) -> int:
    """The bytes that a call makes; those of several results are made where each is taken."""
    return 0 if made_by(node) is not node or isinstance(node.meta.get("val"), (tuple, list)) else nbytes(node)


def _in_order_of_memory(calls: Sequence[Node], memory: _Memory) -> Iterator[Node]:
    """First each call that frees at least what it makes, else the first one that can run.

    A view of a placeholder waits for its turn: what is kept through a codec is opened for its first reader.
    """
    left, place = memory.left(), {node: i for i, node in enumerate(calls)}
    waits = {node: sum(x in place for x in node.all_input_nodes) for node in calls}
    ready = [node for node in calls if not waits[node]]
    while ready:
        early = (node for node in ready if made_by(node).op != "placeholder" and memory.change(node, left) <= 0)
        node = next(early, ready[0])
        ready.remove(node)
        yield node
        memory.run(node, left)
        for user in node.users:
            if user in waits:
                waits[user] -= 1
                if not waits[user]:
                    ready.append(user)
        ready.sort(key=place.__getitem__)
