"""Runs a compiled step under observation: Inductor's own graphs, op by op, with no code generated.

What a compiled model keeps is decided before code is generated, so these graphs keep what the generated code keeps. A
watcher is told each kept tensor and the module that reads it. It is also told which results the generated code never
writes to memory, because the kernel that reads them computes them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ..private_apis import compile_for_inductor, graph_call
from .attribution import module_reading
from .buffers import Buffers
from .policy import hint

_Boxed = Callable[[list[Any]], Any]


class Watcher(Protocol):
    """What `observed` calls."""

    def fused(self) -> AbstractContextManager[object]:
        """A context for ops whose results the generated code holds in registers."""

    def returned(self, x: Tensor, module: str) -> None:
        """A forward graph returned x, which `module` reads first in that graph; "" if that is not known."""


def observed(model: nn.Module, watcher: Watcher) -> Callable[..., Any]:
    """A backend of `torch.compile` for `model` or modules below it.

    Args:
        model: The model by whose module names the watcher is told.
        watcher: It is called whenever a compiled graph runs.
    """
    names = {str(id(module)): name for name, module in model.named_modules()}

    def run_instead(graph: GraphModule, inputs: Sequence[Any], **options: Any) -> _Boxed:
        return _boxed(_Watched(graph, names, watcher))

    return compile_for_inductor(run_instead)


def _boxed(graph: _Watched) -> _Boxed:
    def run(args: list[Any]) -> list[Any]:
        return graph(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _Watched:
    """A boxed graph: it takes a list and empties it, so that each tensor is freed after its last reader."""

    def __init__(self, graph: GraphModule, names: dict[str, str], watcher: Watcher) -> None:
        self._module, self._watcher = graph, watcher
        self._plan = Buffers(graph.graph)
        calls = (node for node in graph.graph.nodes if node.target is graph_call())
        self._called = {call: _Watched(getattr(graph, call.args[1]), names, watcher) for call in calls}
        output = next(node for node in reversed(graph.graph.nodes) if node.op == "output")
        self._returned: tuple[Any, ...] = tuple(output.args[0])
        self._modules = [names.get(module_reading(x), "") if isinstance(x, Node) else "" for x in self._returned]

    def __call__(self, args: list[Any]) -> list[Any]:
        results = self.run(args)
        for x, module in zip(results, self._modules, strict=True):
            if isinstance(x, Tensor):
                self._watcher.returned(x, module)
        return results

    def run(self, args: list[Any]) -> list[Any]:
        """What the graph returns. The watcher is not told of it, as if it was a part of another graph."""
        values: dict[Node, Any] = {}
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                values[node] = args.pop(0)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(node.target)(self._module)
            elif node.op == "call_function":
                if node in self._plan.whole:
                    whole = self._plan.whole[node]
                    like = whole.meta["val"]
                    values[whole] = torch.empty([hint(x) for x in like.shape], dtype=like.dtype, device=like.device)
                # drop the value that stood for this node until now
                values.pop(node, None)
                values[node] = self._run(node, values)
            for dead in self._plan.dead.get(node, ()):
                del values[dead]
        return [values[x] if isinstance(x, Node) else x for x in self._returned]

    def _run(self, node: Node, values: dict[Node, Any]) -> Any:
        if node in self._called:
            return self._called[node].run([values[x] for x in node.args[2:]])  # type: ignore[index]
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        with self._watcher.fused() if node in self._plan.no_memory else nullcontext():
            return node.target(*args, **kwargs)  # type: ignore[operator]
