"""The private names of torch and transformers that this package uses: the one place to look at after an upgrade.

Whatever can be wrapped is wrapped here, and other files use it under a public name. Attributes of tensors and modules
are read where they are needed. `names.py` lists all of them: for what, and since which version they exist.
`tests/test_private_apis.py` tries each by its name, and finds names that are not in the list.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _NormBase as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvolutionBase
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes

from .hooks import (
    accumulation_hooks,
    as_in_first_run,
    hooks_on_every_module,
    innermost_saved_tensor_hooks,
    is_idle_capture,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    runs_again_in,
    saved_tensor_hooks_allowed,
    without_saved_tensor_hooks,
)
from .names import PRIVATE_APIS, PrivateAPI

# the names that come from elsewhere; those that are defined below need no entry
__all__ = [
    "PRIVATE_APIS",
    "BatchNormBase",
    "ConvolutionBase",
    "FakeTensor",
    "FakeTensorMode",
    "PrivateAPI",
    "accumulation_hooks",
    "as_in_first_run",
    "hooks_on_every_module",
    "innermost_saved_tensor_hooks",
    "is_idle_capture",
    "pop_saved_tensor_hooks",
    "push_saved_tensor_hooks",
    "runs_again_in",
    "saved_tensor_hooks_allowed",
    "unset_fake_temporarily",
    "without_dispatch_modes",
    "without_saved_tensor_hooks",
]


_AUTOGRAD_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
_AUTOGRAD_KEYS |= torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def below_autograd() -> AbstractContextManager[Any]:
    """In this context ops bypass autograd: inside of our Functions it has nothing to do, and it costs host time.

    A mode that sees each op would get composite ops there (linear, reshape), so nothing changes while one is on.
    """
    return nullcontext() if torch._C._len_torch_dispatch_stack() else torch._C._AutoDispatchBelowAutograd()


def above_autograd() -> Any:
    """In this context, inside of `below_autograd`, ops go through autograd again."""
    exclude = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD_KEYS
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)


def profiler_runs() -> bool:
    """Whether a torch.profiler or an autograd profiler is recording in this process."""
    return torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def current_backward() -> int:
    """A number for the backward that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something when the backward that runs in this thread ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[no-untyped-call]


def run_backward(loss: Tensor) -> None:
    """The engine's part of ``loss.backward()``, because no TorchFunctionMode is on inside of the method itself."""
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[no-untyped-call]
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


# the code of the Python functions that run the autograd engine: they are the callers of what the engine calls
ENGINE_CALLS = frozenset((run_backward.__code__, torch.autograd.graph._engine_run_backward.__code__))


def delayed_error(message: str, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """A function that returns its `count` tensors, and whose backward raises."""
    return torch._C._functions.DelayedError(message.encode(), count)  # type: ignore[attr-defined, no-any-return]


def transforms_or_export() -> bool:
    """Whether torch.func transforms or forward-mode differentiation are on, or torch.export or torch.jit traces.

    The public test of exporting is also true in torch.compile where torch 2.11 traces its call.
    """
    transforms = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transforms or torch.compiler._is_exporting_flag or torch._C._get_tracing_state() is not None


def fused_attention_choice(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, dropout: float = 0.0, grouped: bool = False
) -> int:
    """The number of the kernel that `scaled_dot_product_attention` would take, as in torch.nn.attention.SDPBackend."""
    choice: int = torch._fused_sdp_choice(q, k, v, mask, dropout, is_causal, enable_gqa=grouped)
    return choice


def bare_apply(function: Any, *args: Any) -> Any:
    """``function.apply(*args)`` of an autograd Function, for calls where no torch.func transform is or was on."""
    return super(torch.autograd.Function, function).apply(*args)


def not_a_view(y: Tensor) -> Tensor:
    """y over the same memory, as a tensor of its own. Autograd forbids writing on a view that a Function returned."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


ProfilerEvent = torch._C._profiler._EventType
# a context in which the ops of tensor subclasses go past their `__torch_function__`
without_torch_function = torch._C.DisableTorchFunctionSubclass
# in this context no TorchFunctionMode sees calls, not even those on tensors
without_torch_function_modes = torch._C.DisableTorchFunction
without_torch_dispatch = torch._C._DisableTorchDispatch  # in it no dispatch mode and no tensor subclass sees an op


def active_fake_mode() -> FakeTensorMode | None:
    """The mode of this thread in which new tensors are fake; None if there is none."""
    mode: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return mode


def fake_process_store() -> Any:
    """The store of torch's fake process group, whose collectives do nothing. The import makes its backend known."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_tensor(meta: Tensor, like: FakeTensor) -> FakeTensor:
    """A fake tensor over `meta`, with the fake mode and the device of `like`, and nothing else known about it.

    It is what FakeTensor's constructor makes, in a tenth of the time.
    """
    device = like.fake_device
    fake: FakeTensor = Tensor._make_subclass(  # type: ignore[assignment]
        FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
    )
    torch._C._set_throw_on_mutable_data_ptr(fake)
    fake.__dict__.update(like.__dict__)
    return fake


def min_cut_partition(joint: GraphModule, inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
    """Torch's partition of a joint graph into forward and backward, which keeps the fewest bytes it can."""
    from torch._functorch import partitioners

    graphs: tuple[GraphModule, GraphModule] = partitioners.min_cut_rematerialization_partition(joint, inputs, **kwargs)
    return graphs


@cache
def partitioner_ops() -> Any:
    """The sets of ops by which that partition decides: `recomputable_ops`, `compute_intensive_ops`, `random_ops`."""
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def replace_random(graph: GraphModule) -> None:
    """Replace random draws by what Inductor compiles: a seed, and numbers computed from it."""
    from torch._inductor.fx_passes.replace_random import replace_random_passes

    replace_random_passes(graph)


def seed_ops() -> tuple[Any, Any]:
    """The op that makes a tensor of so many seeds for those draws, and the op that takes one out of it."""
    from torch._inductor.inductor_prims import lookup_seed, seeds

    return seeds, lookup_seed


def graph_call() -> Any:
    """The op that calls a graph; Inductor compiles each graph once. None where torch does not have it."""
    return getattr(torch.ops.higher_order, "invoke_subgraph", None)


def written_op() -> Any:
    """Inductor's op that writes a tensor to memory with these strides, unless it is there already."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order


def offload_ops() -> Any:
    """Torch's ops that copy the activations of compiled graphs to host memory and back; None where it has none."""
    try:
        from torch._functorch._activation_offloading import offload_ops as ops
    except ImportError:
        return None
    return torch.ops.ao if hasattr(ops, "wait_tensor") else None


def graph_breaks() -> list[str]:
    """Why graphs were broken in this process so far, a line or more per reason; the last one may be repeated."""
    from torch._dynamo.utils import counters

    return [reason for reason, times in counters["graph_break"].items() for _ in range(times)]


def traced_for_any_size() -> bool:
    """Whether the torch.compile that traces was told dynamic=True."""
    import torch._dynamo

    return not torch._dynamo.config.assume_static_by_default


def traced_frame() -> tuple[Any, Any] | None:
    """Which frame Dynamo is compiling, however often it starts again; None outside of it."""
    from torch._guards import CompileContext

    compiled = CompileContext.current_compile_id()
    return None if compiled is None else (compiled.frame_id, compiled.frame_compile_id)


def after_compiling(function: Callable[[object], None]) -> None:
    """Let Dynamo call `function` after each frame that it compiles or skips. Registering it again changes nothing."""
    from torch._dynamo.callback import callback_handler

    if function not in callback_handler.end_callbacks:
        callback_handler.register_end_callback(function)


def inductor_decompositions() -> Any:
    """The decompositions of ops that Inductor applies before it compiles."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def compile_for_inductor(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that divides and changes graphs as Inductor does; `compile_graph` takes the place of its code."""
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: GraphModule, inputs: Any, **options: Any) -> Any:
        # not from a cache, which would return the code of another graph
        with config.patch(enable_autograd_cache=False):
            return compile_fx(graph, inputs, inner_compile=compile_graph)

    return backend
