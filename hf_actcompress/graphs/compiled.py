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
from torch.fx import GraphModule, Node

from ..codecs import Codec
from ..compilation.packing import functional
from ..ops.autocast import autocast_off
from ..private_apis import without_dispatch_modes, without_saved_tensor_hooks
from ..private_apis.inductor import Boxed, inductor_code
from .backward import Stops
from .compiled_run import BackwardRun, ForwardRun, Layout, PackedInGraph, symbols_in
from .plan import LayerPlan
from .retraced import NotCompiled, Run, refuse_opaque, with_results
from .trace import first_line

_log = logging.getLogger(__name__)


class Compiled:
    """Forward and backward of a plan in Inductor's code.

    Args:
        plan: The plan.
        codecs: The codec of each tensor that it keeps through one, by its place among the kept tensors.

    Attributes:
        forward: Takes the inputs and returns what the plan's own code does.

    Raises:
        NotCompiled: The plan has code that no compiler sees, or Inductor cannot compile it.
    """

    def __init__(self, plan: LayerPlan, codecs: dict[int, Codec]) -> None:
        self._plan = plan
        for half in (plan.halves.forward, plan.halves.backward):
            refuse_opaque(half.graph)
        self._in_graph: dict[int, PackedInGraph] = {}
        # by the place of a kept tensor: it, without data, as the forward's code lays it out in memory
        self._kept: dict[int, Any] = {}
        self._backwards: dict[frozenset[int], tuple[Callable[..., Any], tuple[int, ...]]] = {}
        self.forward = self._forward(codecs)

    def backward(self, missing: frozenset[int], stops: Stops) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """As the plan's; it returns all gradients at once."""
        if missing not in self._backwards:
            self._backwards[missing] = self._backward(missing)
        return self._backwards[missing]

    def _forward(self, codecs: dict[int, Codec]) -> Callable[..., Sequence[Any]]:
        plan, halves = self._plan, self._plan.halves
        inputs = halves.inputs
        inner = [x for x in halves.kept if x not in inputs]
        results = [*halves.outputs, *inner, *halves.sizes]
        module, given = with_results(halves.forward, halves.forward.graph, results)
        packs = {halves.kept[x.place]: x for x in plan.packed if not x.outside}
        in_graph = {node.name: x for node, x in packs.items() if x.rows is None}
        apart = {results.index(node, plan.outputs): x for node, x in packs.items() if x.rows is not None}
        forms: list[PackedInGraph] = []

        def call(*values: Any) -> list[Any]:
            forms.clear()
            made: dict[str, tuple[tuple[Tensor, ...], object]] = {}

            def pack(node: Node, value: Any) -> None:
                if node.name in in_graph:
                    x = in_graph[node.name]
                    made[node.name] = codecs[x.place].pack(value if x.order is None else value.permute(x.order))

            found = Run(module, pack).run(*values)
            flat = list(found[: plan.outputs])
            for node, value in zip(results[plan.outputs :], found[plan.outputs :], strict=True):
                if node.name in made:
                    x = in_graph[node.name]
                    forms.append(PackedInGraph(x, codecs[x.place], *made[node.name]))
                    flat += made[node.name][0]
                else:
                    flat.append(value)
            return flat + [size for form in forms for size in symbols_in(form.meta)]

        graph = _graph_for_inductor(call, [x.meta["val"] for x in given])
        values = [x.meta["val"] for x in _returned(graph)]
        sizes = {halves.kept[form.packed.place]: len(form.tensors) for form in forms}
        counts = [sizes.get(node) if i >= plan.outputs else None for i, node in enumerate(results)]
        layout = Layout(counts, forms, {i: x.packer(codecs[x.place]) for i, x in apart.items()})
        self._note(layout, values, results, forms)
        code = _compiled(graph, plan, backward=False)
        places = [inputs.index(x) for x in given]
        return ForwardRun(code, places, layout, plan.outputs).run

    def _note(
        self, layout: Layout, values: Sequence[Any], results: Sequence[Node], forms: Sequence[PackedInGraph]
    ) -> None:
        """Note how what the forward makes lies in memory, for the backward's graph."""
        halves = self._plan.halves
        packed = iter(forms)
        for i, (at, count) in enumerate(layout.places):
            place = halves.kept.index(results[i]) if results[i] in halves.kept else None
            if count is not None:
                form = next(packed)
                self._in_graph[form.packed.place] = form._replace(tensors=tuple(values[at : at + count]))
            elif place is not None and i not in layout.apart:
                self._kept[place] = values[at]

    def _backward(self, missing: frozenset[int]) -> tuple[Callable[..., Any], tuple[int, ...]]:
        code = self._plan.code
        part = code.part(missing)
        module, given = with_results(self._plan.halves.backward, part.graph, part.returned)
        places = [part.places[node] for node in given]
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        counts: list[int | None] = []
        fakes: list[Any] = []
        for node, place in zip(given, places, strict=True):
            form = self._in_graph.get(place)
            counts.append(None if form is None else len(form.tensors))
            fakes += [self._kept.get(place, node.meta["val"])] if form is None else form.tensors

        def call(*values: Any) -> list[Any]:
            left = iter(values)
            opens: dict[str, Callable[[], Tensor]] = {}
            arguments: list[Any] = []
            for name, place, count in zip(names, places, counts, strict=True):
                if count is None:
                    arguments.append(next(left))
                else:
                    tensors = tuple(next(left) for _ in range(count))
                    opens[name] = _opener(self._in_graph[place], tensors)
                    arguments.append(None)
            found = Run(module, opens=opens).run(*arguments)
            return [x for x in found if x is not None]

        graph = _graph_for_inductor(call, fakes)
        run = _compiled(graph, self._plan, backward=True)
        reads = [(i, code.opens.get(i), count is not None) for i, count in zip(places, counts, strict=True)]
        return BackwardRun(run, reads, [x is not None for x in part.returned]).run, part.zeros


def _opener(form: PackedInGraph, tensors: tuple[Tensor, ...]) -> Callable[[], Tensor]:
    return lambda: form.packed.back(form.codec.unpack(tensors, form.meta))


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


def _graph_for_inductor(call: Callable[..., list[Any]], values: Sequence[Any]) -> GraphModule:
    """The graph of a function in Inductor's own ops."""
    with _alone(values):
        try:
            return functional(call, values)
        except NotCompiled:
            raise
        except Exception as error:
            raise NotCompiled(f"its graph cannot be traced once more ({first_line(error)})") from error


def _compiled(graph: GraphModule, plan: LayerPlan, *, backward: bool) -> Boxed:
    """Inductor's code of a graph.

    Raises:
        NotCompiled: Inductor cannot compile a forward.
        RuntimeError: It cannot compile a backward that makes random numbers again. Another one runs op by op.
    """
    try:
        with _alone([]):
            return inductor_code(graph, plan.mode, backward=backward)
    except Exception as error:
        reason = f"Inductor cannot compile it ({first_line(error)})"
    if not backward:
        raise NotCompiled(reason)
    if any("inductor" in str(node.target) for node in graph.graph.nodes):
        raise RuntimeError(f"{reason}, whose forward it has compiled; call patch_model with compile=False")
    _say_once(reason)
    return lambda given: graph(*given)


def _alone(values: Sequence[Any]) -> ExitStack:
    """A context in which nothing of what is around a call is traced or compiled with it."""
    device = next((x.device.type for x in values if isinstance(x, Tensor)), "cpu")
    stack = ExitStack()
    for context in (torch.no_grad(), without_dispatch_modes(), without_saved_tensor_hooks(), autocast_off(device)):
        stack.enter_context(context)
    return stack


def _returned(graph: GraphModule) -> tuple[Node, ...]:
    return graph.graph.output_node().args[0]  # type: ignore[return-value]
