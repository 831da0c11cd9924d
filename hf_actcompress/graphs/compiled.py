"""The code of a plan as Inductor makes it, for layers whose modules have the same codecs.

What is kept through a codec is packed and unpacked in the graphs. What crosses is the same as without a compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ..codecs import Codec
from ..compilation.functional import functional
from ..compilation.policy import made_of
from ..errors import first_line
from ..ops.autocast import autocast_off
from ..private_apis import without_dispatch_modes, without_saved_tensor_hooks
from ..private_apis.graphs import ONE_TRACE
from ..private_apis.inductor import Boxed, inductor_code
from .backward import Part, Stops
from .code import forward_code
from .packing import Packed
from .plan import LayerPlan
from .segments import Cutter, Segmented

_log = logging.getLogger(__name__)


class NotCompiled(Exception):
    """Why a plan is not compiled."""


class Compiled:
    """Forward and backward of a plan, of which Inductor has made the code.

    Args:
        plan: The plan.
        codecs: The codec of each tensor that it keeps through one, by its place among the kept tensors.

    Attributes:
        forward: As the plan's.
        apart: What is not packed in the graph: the forward is given what packs it.

    Raises:
        NotCompiled: Inductor cannot compile it.
    """

    def __init__(self, plan: LayerPlan, codecs: dict[int, Codec]) -> None:
        self._plan = plan
        self._backwards: dict[frozenset[int], tuple[Callable[..., Any], tuple[int, ...]]] = {}
        halves = plan.halves
        kept = [x for x in halves.kept if x not in halves.inputs]
        results = [*halves.outputs, *kept, *halves.sizes]
        packs = {halves.kept[x.place]: (x, codecs[x.place]) for x in plan.packed if not x.outside and x.rows is None}
        nodes = _in_order(halves.forward.graph, made_of(results))
        read = [*halves.outputs, *(x for x in kept if x not in packs), *halves.sizes]
        self._forward = Cutter(halves.forward, nodes, read, _compiler(plan, False), packs=packs, backward=False).cut()
        self.forward, self.apart = self._code_of(self._forward, kept)

    def _code_of(self, made: Segmented, kept: Sequence[Node]) -> tuple[Callable[..., Any], list[Packed]]:
        halves = self._plan.halves
        new = [made.records[x] if x in made.records else made.copied[x] for x in kept]
        outputs = [made.copied[x] for x in halves.outputs]
        sizes = [made.copied[x] for x in halves.sizes]
        made.graph.output((*outputs, *new, *sizes))
        made.graph.owning_module = halves.forward
        inputs = [made.copied.get(x) or made.graph.placeholder(x.name) for x in halves.inputs]
        apart = [x for x in self._plan.packed if not x.outside and halves.kept[x.place] not in made.records]
        inside = [made.copied[halves.kept[x.place]] for x in apart]
        return forward_code(made.graph, inputs, outputs, [*new, *sizes], inside), apart

    def backward(self, missing: frozenset[int], stops: Stops) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """As the plan's; it returns all gradients at once."""
        if missing not in self._backwards:
            self._backwards[missing] = self._plan.code.write(missing, (), self._part)
        return self._backwards[missing]

    def _part(self, part: Part) -> Part:
        """The part of a backward in segments."""
        kept, made = self._plan.halves.kept, self._forward
        results = [x for x in part.returned if x is not None]
        nodes = _in_order(part.graph, part.needed)
        read = {node: kept[i] for node in nodes if (i := part.places.get(node, len(kept))) < len(kept)}
        opened = {node: made.forms[x] for node, x in read.items() if x in made.forms}
        values = {node: made.values[x] for node, x in read.items() if x in made.values and node not in opened}
        cut = Cutter(
            self._plan.halves.backward, nodes, results, _compiler(self._plan, True),
            values=values, opened=opened, backward=True,
        ).cut()  # fmt: skip
        returned = [None if x is None else cut.copied[x] for x in part.returned]
        cut.graph.output(tuple(returned))
        cut.graph.owning_module = self._plan.halves.backward
        places = {cut.copied[node]: i for node, i in part.places.items() if node in cut.copied}
        raw = frozenset(part.places[node] for node in opened)
        return Part(cut.graph, places, returned, set(cut.graph.nodes), part.zeros, raw)


def _in_order(graph: Graph, needed: set[Node]) -> list[Node]:
    return [node for node in graph.nodes if node in needed]


def compiled(plan: LayerPlan, codecs: dict[int, Codec]) -> Compiled | str:
    """The compiled code of a plan, the same one for the same codecs; or why there is none, which is said once."""
    key = tuple(codecs.items())
    if key not in plan.compiled:
        try:
            plan.compiled[key] = Compiled(plan, codecs)
        except NotCompiled as reason:
            plan.compiled[key] = str(reason)
            _say_once(str(reason))
    return plan.compiled[key]  # type: ignore[no-any-return]


@cache
def _say_once(reason: str) -> None:
    _log.warning("a layer's plan is not compiled: %s; it runs as it is", reason)


def _compiler(plan: LayerPlan, backward: bool) -> Callable[..., tuple[Boxed, list[Any]]]:
    """What compiles the segments of a half.

    Raises:
        NotCompiled: Inductor cannot compile a segment of a forward.
        RuntimeError: It cannot compile one of a backward that makes random numbers again. Others run op by op.
    """

    def compile(call: Callable[..., list[Any]], values: Sequence[Any]) -> tuple[Boxed, list[Any]]:
        reason = "its graph cannot be traced once more"
        graph: GraphModule | None = None
        with _alone(values):
            try:
                graph = functional(call, values)
                reason = "Inductor cannot compile it"
                returned = [x.meta["val"] for x in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
                return inductor_code(graph, plan.mode, backward=backward), returned
            except Exception as error:
                reason = f"{reason} ({first_line(error)})"
                if not backward:
                    raise NotCompiled(reason) from error
                if graph is None or any("inductor" in str(node.target) for node in graph.graph.nodes):
                    raise RuntimeError(f"{reason}; call patch_model with compile=False") from error
        _say_once(reason)
        return (lambda given: graph(*given)), returned

    return compile


def _alone(values: Sequence[Any]) -> ExitStack:
    """A context in which nothing of what is around a call is traced or compiled with it."""
    device = next((x.device.type for x in values if isinstance(x, Tensor)), "cpu")
    stack = ExitStack()
    modes = without_dispatch_modes(), without_saved_tensor_hooks(), autocast_off(device)
    for context in (ONE_TRACE, torch.no_grad(), *modes):
        stack.enter_context(context)
    return stack
