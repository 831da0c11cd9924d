"""The backend "hf_actcompress": the graphs of a patched model run op by op, with nothing generated.

It gives the values of eager mode and keeps what the compiled model keeps. For debugging, and for devices that Inductor
does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule
from torch.fx.graph import _BoxedCodeGen

from .partition import partition

NAME = "hf_actcompress"


def register() -> None:
    """Make the backend known by its name where the package is not installed: an installed one has an entry point."""
    from torch._dynamo.backends import registry

    if NAME not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=NAME)


def backend(graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """A backend of `torch.compile`. It takes no options."""
    from torch._dynamo.backends.common import aot_autograd

    compiled: Callable[..., Any] = aot_autograd(fw_compiler=_as_it_is, partition_fn=partition)(graph, inputs)
    return compiled


def _as_it_is(graph: GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
    # a function of one list, which it empties: each saved tensor is freed behind its last reader
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(args: list[Any]) -> Any:
        return graph.forward(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
