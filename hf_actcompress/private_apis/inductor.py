"""Inductor called with graphs that we trace ourselves, without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

# a function of a list, which it empties
Boxed = Callable[[list[Any]], Sequence[Any]]


def inductor_code(graph: GraphModule, mode: FakeTensorMode, *, backward: bool) -> Boxed:
    """The code that Inductor makes of a graph of its own ops, which `make_fx` has traced in that mode.

    What it returns lies in memory as the graph says, also what no user sees.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner, record_original_output_strides

    output: Any = graph.graph.output_node()
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    record_original_output_strides(graph)
    given = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(mode)):
        code: Boxed = compile_fx_inner(graph, given, is_backward=backward)
    return code


def seed_on(device: torch.device) -> Tensor:
    """In a graph: a number [1] drawn from the device's generator, of which Inductor makes random numbers in a kernel.

    Each draw has a tensor of its own: the place of a seed in a tensor would be written into the code of the kernel.
    """
    import torch._inductor.inductor_prims as prims

    return prims.seeds(1, device)  # type: ignore[no-any-return]


def random_of(seed: Tensor, shape: Sequence[Any], normal: bool = False) -> Tensor:
    """In a graph: fp32 numbers of a seed, uniform in [0, 1) or normal, the same ones each time."""
    import torch._inductor.inductor_prims as prims

    return prims.random(shape, prims.lookup_seed(seed, 0), "randn" if normal else "rand")  # type: ignore[no-any-return]
