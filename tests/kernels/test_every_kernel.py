"""What holds for every row of the kernels' table: signatures, empty tensors, and what torch.compile needs."""

from __future__ import annotations

import importlib
import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress.dispatch import use
from hf_actcompress.kernels import KERNELS
from hf_actcompress.methods.fewbit.op import activation_fewbit
from hf_actcompress.methods.inverted.op import activation_output
from hf_actcompress.methods.norm_output.op import layer_norm_output, rms_norm_output
from hf_actcompress.reference.table import FUNCTIONS
from tests.kernels.harness import DEVICE, present, run, samples, specified
from tests.oracle import assert_equal_bits, gradients

every_kernel = pytest.mark.parametrize("name", KERNELS)

# these have no operators in a traced graph, because a compiler fuses stock's ops there
EAGER = {"activation_fwd", "gated_product_fwd"}


@every_kernel
def test_signature_is_the_references(name: str) -> None:
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    assert inspect.signature(getattr(module, name)) == inspect.signature(FUNCTIONS[name])


@every_kernel
def test_nothing_in_nothing_out(name: str) -> None:
    for args in samples(name, torch.bfloat16, 0, 64):
        ours, stock = run(name, args), specified(name, args)
        assert [x is None for x in ours] == [x is None for x in stock]
        assert_equal_bits(present(ours), present(stock))


class _Calls(TorchDispatchMode):
    """The operators of this package that were called, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "hf_actcompress":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))


def opcheck(func: Any, args: tuple[Any, ...]) -> None:
    # the schema check compares by a function that torch lacks for fp8
    narrow = any(isinstance(x, Tensor) and x.is_floating_point() and x.itemsize == 1 for x in args)
    torch.library.opcheck(func, args, test_utils=("test_faketensor",) if narrow else ("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", sorted(set(KERNELS) - EAGER))
def test_is_an_operator_while_a_graph_is_traced(name: str) -> None:
    module = importlib.import_module(f"hf_actcompress.{KERNELS[name]}")
    for args in list(samples(name, torch.bfloat16, 3, 64))[:2]:
        with _Calls() as calls, mock.patch("torch.compiler.is_compiling", return_value=True):
            getattr(module, name)(*args)
        assert calls.seen
        for func, inputs in calls.seen:
            opcheck(func, inputs)


# ops that appear in a graph; modules that keep their input run stock's code there instead
TRACED = {
    "layer_norm_output": lambda x, weight: layer_norm_output(x, (24,), weight),
    "rms_norm_output": lambda x, weight: rms_norm_output(x, weight, 1e-6),
    "activation_output": lambda x, weight: activation_output(x, torch.nn.functional.gelu, "gelu") * weight,
    "activation_fewbit": lambda x, weight: activation_fewbit(x, torch.nn.functional.silu, "silu") * weight,
}


@pytest.mark.parametrize("name", TRACED)
def test_fullgraph(name: str) -> None:
    """A compiled function keeps an explicit choice. Its graph has no break and contains the operators."""
    operators: list[str] = []

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=collect, bw_compiler=collect)
    inputs = [torch.randn(*shape, device=DEVICE, requires_grad=True) for shape in ((6, 24), (24,))]
    with use("triton"):
        eager = gradients(TRACED[name], inputs)
        compiled = gradients(torch.compile(TRACED[name], fullgraph=True, backend=backend), inputs)
    assert_equal_bits(compiled, eager)
    assert any(operator.startswith("hf_actcompress.") for operator in operators), operators
