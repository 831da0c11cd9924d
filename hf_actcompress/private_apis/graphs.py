"""Graphs that we trace ourselves: how torch divides them, and what its ops are called by."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode, in_kernel_invocation_manager
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from . import min_cut_partition

# Held while a graph is traced. FX replaces `nn.Module.__call__` for all threads meanwhile, and two traces at once
# could leave a replacement there
ONE_TRACE = threading.RLock()
_BUILT_IN = (types.BuiltinFunctionType, type(Tensor.view))


def divided(joint: GraphModule, inputs: Any, mode: FakeTensorMode, outputs: int) -> tuple[GraphModule, GraphModule]:
    """Torch's partition of a joint graph that `make_fx` has traced in that mode."""
    from torch._functorch import config
    from torch._guards import TracingContext, tracing

    with config.patch(cse=False), tracing(TracingContext(mode)):
        return min_cut_partition(joint, inputs, num_fwd_outputs=outputs)


def code_when_asked() -> AbstractContextManager[None]:
    """Inside, modules of graphs write their Python code when it is read, not each time their graph changes."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


@cache
def binding(target: Any) -> Any:
    """What costs the host less than an op's overload and does the same: torch's own binding of the op, if it has one.

    A list with gaps as an argument is taken by the overload alone, and a loss whose reduction is not given has another
    one in the binding.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return target
    arguments = target._schema.arguments
    if any(str(x.type) == "List[Optional[Tensor]]" or x.name == "reduction" for x in arguments):
        return target
    name = target._schema.name.partition("::")[2]
    for place in (torch, Tensor, torch._C._nn):
        found = getattr(place, name, None)
        if isinstance(found, _BUILT_IN):
            return found
    return target


def without_logs_of_fakes(wanted: Callable[[], bool]) -> None:
    """Keep torch from logging ops that have no meta kernel, unless they are `wanted`."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(lambda record: wanted())


def any_sizes() -> AbstractContextManager[Any]:
    """Inside, ops made of others ask for no size as a number, because Python's code composes them, not torch's."""
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()  # type: ignore[no-any-return, no-untyped-call]


def _grouped_product(
    mode: FakeTensorMode, func: Any, a: Tensor, b: Tensor, offs: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """A grouped product without data: of rows [S, k] with [E, k, n], or of [m, S] with [S, n] for each group.

    Torch's own rule says the shape of the result for bf16 only.
    """
    if a.dtype == torch.bfloat16 or offs is None or args or kwargs:
        return NotImplemented
    with mode:
        if a.dim() == b.dim() == 2:
            return a.new_empty(offs.numel(), a.size(0), b.size(1))
        return a.new_empty(*a.shape[:-1], b.size(-1))


def _has_rule_in_python(func: Any) -> bool:
    return torch._C.DispatchKey.Meta in func.py_kernels


@register_op_impl(_has_rule_in_python)
def _in_python(mode: FakeTensorMode, func: Any, *args: Any, **kwargs: Any) -> Any:
    """An op without data, by torch's rule in Python where sizes are symbols: some rules in C++ ask for numbers."""
    sizes = (size for x in args for size in (x.shape if isinstance(x, Tensor) else x if isinstance(x, list) else ()))
    if mode.shape_env is None or not any(isinstance(size, torch.SymInt) for size in sizes):
        return NotImplemented
    with in_kernel_invocation_manager(mode), any_sizes():
        found = func(*args, **kwargs)
    given = pytree.arg_tree_leaves(*args, **kwargs)
    return mode.wrap_meta_outputs_with_default_device_logic(found, func, given, device=kwargs.get("device"))  # type: ignore[arg-type]


if torch.ops.aten._grouped_mm.default not in op_implementations_dict:
    register_op_impl(torch.ops.aten._grouped_mm.default)(_grouped_product)
