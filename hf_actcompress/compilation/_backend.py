"""The backend "hf_actcompress": it runs the graphs of a patched model op by op, and generates no code.

Its values are those of eager mode, and it keeps what a compiled model keeps. It is for debugging, and for devices that
Inductor does not support.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

from .partition import partition

NAME = "hf_actcompress"


def register() -> None:
    """Register the backend if the package is not installed; an installed package has an entry point for it."""
    from torch._dynamo.backends import registry

    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=NAME)


def backend(graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """A backend of `torch.compile`. It takes no options."""
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_as_it_is, partition_fn=partition)(graph, inputs)
    return compiled


def _as_it_is(graph: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    # boxed: the graph takes a list and empties it, so that each saved tensor is freed after its last reader
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(args: list[Any]) -> Any:
        return graph.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
