"""The contract of every op in the table: its gradients, its kept bytes, and that it changes no tensor of others."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_actcompress.ops.table import OPS
from hf_actcompress.records import frame, live_entries
from tests.ops.cases import BUILDERS, CASES, ELSEWHERE, conv2d_cases, linear_cases
from tests.ops.contract_case import DTYPES, Case
from tests.oracle import (
    assert_equal_bits,
    assert_within_law,
    clones,
    gradients,
    graph_nodes,
    kept_bytes,
    pattern,
    tensors_in,
    widened,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compare(case: Case, inputs: list, dtype: torch.dtype, dy: Tensor | None = None) -> None:
    """Requires bit-equality where it is promised, else law 2."""
    ours, stock = gradients(case.ours, inputs, dy), gradients(case.stock, inputs, dy)
    assert_equal_bits(ours[:1], stock[:1])
    if dtype in case.bits:
        assert_equal_bits(ours, stock)
    else:
        wide = dy.double() if dy is not None else pattern(stock[0]).double()
        assert_within_law(ours, stock, gradients(case.stock, [widened(x) for x in inputs], wide))


def test_every_row_has_a_builder():
    rows = {(op.name, op.variant) for op in OPS}
    assert rows == set(BUILDERS) | set(ELSEWHERE)
    for file in ELSEWHERE.values():
        assert (Path(__file__).parent / file).exists(), file


@pytest.mark.daily(4)
@pytest.mark.parametrize("case", [case for case in CASES if case.gradcheck], ids=lambda case: case.id)
def test_gradcheck(case):
    inputs = case.inputs(2, torch.float64)
    assert torch.autograd.gradcheck(case.ours, inputs)


@every_case
@every_dtype
def test_values_and_gradients(case, dtype):
    compare(case, case.inputs(2, dtype), dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case.strided], ids=lambda case: case.id)
@every_dtype
def test_non_contiguous_inputs(case, dtype):
    inputs = case.inputs(2, dtype)
    for i in range(case.activations):
        x = inputs[i]
        wider = torch.cat([x, x], dim=-1).detach()
        inputs[i] = wider[..., : x.size(-1)].requires_grad_(x.requires_grad)
        assert not inputs[i].is_contiguous()
    compare(case, inputs, dtype)


@every_case
def test_transposed_and_expanded_incoming_gradients(case):
    inputs = case.inputs(2, torch.float32)
    y = case.stock(*clones(inputs))
    dense = pattern(y)
    transposed = dense.transpose(-1, -2).contiguous().transpose(-1, -2)
    expanded = dense[..., :1].expand_as(dense)
    scalar = torch.ones((), dtype=y.dtype).expand_as(dense)
    # for other layouts of dy, stock and ours may sum in different orders, so law 2 applies
    for dy in (transposed, expanded, scalar):
        ours, stock = gradients(case.ours, inputs, dy), gradients(case.stock, inputs, dy)
        oracle = gradients(case.stock, [widened(x) for x in inputs], dy.double())
        assert_within_law(ours, stock, oracle)


@every_case
def test_backward_twice(case):
    """The second one runs under autocast: it changes nothing, because the forward ran without."""
    leaves = clones(case.inputs(2, torch.float32))
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    y = case.ours(*leaves)
    first = torch.autograd.grad(y, wanted, pattern(y), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal_bits(torch.autograd.grad(y, wanted, pattern(y), retain_graph=True), first)
    assert_equal_bits(torch.autograd.grad(y, wanted, pattern(y)), first)
    if case.kept(leaves):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y, wanted, pattern(y))


@every_case
def test_every_subset_of_wanted_gradients(case):
    inputs = case.inputs(2, torch.float32)
    differentiable = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
    for count in range(1, len(differentiable)):
        for subset in itertools.combinations(differentiable, count):
            frozen = clones(inputs)
            for i in differentiable:
                frozen[i].requires_grad_(i in subset)
            compare(case, frozen, torch.float32)


@every_case
def test_saved_bytes(case):
    """Counts with the allocator. Activations cost what is documented; weights and masks are kept by reference."""
    inputs = case.inputs(4, torch.float32)
    count = case.activations

    def run() -> Tensor:
        # neg keeps nothing, so whatever of its results still exists after the forward is what the op keeps
        with frame():
            return case.ours(*(-x for x in inputs[:count]), *inputs[count:])

    assert kept_bytes(run) == case.kept(inputs)


@pytest.mark.parametrize("case", [case for case in CASES if case.weight_only is not None], ids=lambda case: case.id)
def test_frozen_weight_keeps_no_input(case):
    inputs = case.inputs(4, torch.float32)
    inputs[case.weight_only].requires_grad_(False)
    assert kept_bytes(lambda: case.ours(-inputs[0], *inputs[1:])) == 0


@pytest.mark.parametrize("case", [case for case in CASES if case.weight_only is not None], ids=lambda case: case.id)
def test_frozen_input_keeps_no_weight(case):
    inputs = case.inputs(4, torch.float32)
    inputs[0].requires_grad_(False)
    y = case.ours(*inputs)
    assert all(x.shape != inputs[case.weight_only].shape for x in y.grad_fn.saved_tensors)


@every_case
def test_no_grad_keeps_nothing(case):
    inputs = case.inputs(4, torch.float32)

    def run() -> Tensor:
        with torch.no_grad(), frame():
            return case.ours(*inputs)

    assert kept_bytes(run) == 0


@every_case
def test_no_tensor_on_ctx(case):
    nodes = [node for node in graph_nodes(case.ours(*case.inputs(2, torch.float32))) if hasattr(node, "slots")]
    assert nodes or case.id.startswith("cast")
    for node in nodes:
        assert list(tensors_in(vars(node))) == []


@every_case
@pytest.mark.parametrize("kind", ["checkpoint", "reentrant", "save_on_cpu"])
def test_under_checkpointing_and_offloading(case, kind):
    def wrapped(*inputs: Tensor) -> Tensor:
        if kind == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return case.ours(*inputs)
        return checkpoint(case.ours, *inputs, use_reentrant=kind == "reentrant")

    inputs = clones(case.inputs(2, torch.float32))
    # reentrant checkpointing works only with .backward()
    with frame():
        y = wrapped(*inputs)
    y.backward(pattern(y))
    # a recomputation does not clear the registry; its entries end with their tensors
    ours = [y.detach(), *(x.grad for x in inputs if x is not None and x.requires_grad)]
    assert_equal_bits(ours, gradients(case.ours, inputs))
    assert live_entries() == 0


@every_case
@every_dtype
def test_nothing_is_written(case, dtype):
    """Two backwards leave inputs, output, incoming gradient and saved tensors as they were."""
    leaves = clones(case.inputs(2, dtype))
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    y = case.ours(*leaves)
    dy = pattern(y)
    saved = [x for node in graph_nodes(y) for x in getattr(node, "saved_tensors", ()) if x is not None]
    watched = [x.detach() for x in (*leaves, y, dy, *saved) if x is not None]
    before = [x.clone() for x in watched]
    versions = [x._version for x in watched]
    for _ in range(2):
        torch.autograd.grad(y, wanted, dy, retain_graph=True)
    assert_equal_bits(watched, before)
    assert [x._version for x in watched] == versions


@pytest.mark.parametrize("case", [case for case in CASES if "fused" not in case.id], ids=lambda case: case.id)
def test_zero_size_inputs(case):
    inputs = case.inputs(0, torch.float32)
    for ours, stock in zip(gradients(case.ours, inputs), gradients(case.stock, inputs), strict=True):
        assert ours.shape == stock.shape and torch.equal(ours, stock)


@every_case
@pytest.mark.parametrize("dy_requires_grad", [True, False])
def test_double_backward_raises(case, dy_requires_grad):
    """It raises even if the incoming gradient needs no gradient. torch's own decorator would not raise then."""
    inputs = clones(case.inputs(2, torch.float32))
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    y = case.ours(*inputs)
    dy = pattern(y).requires_grad_(dy_requires_grad)
    (dx, *_) = torch.autograd.grad(y, wanted, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="unpatch_model"):
        dx.sum().backward()


@every_case
def test_output_written_in_place(case):
    """Model code writes on the outputs of layers. Where stock allows it, so do we, with the same gradients."""

    def written(function):
        def run(*inputs):
            y = function(*inputs)
            y *= 2.0
            return y

        return run

    inputs = case.inputs(2, torch.float32)
    try:
        stock = gradients(written(case.stock), inputs)
    except RuntimeError:
        pytest.skip("stock refuses it")
    for ours, expected in zip(gradients(written(case.ours), inputs), stock, strict=True):
        torch.testing.assert_close(ours, expected)


# only these ops stand in a compiled graph; for others, a traced module runs stock's code and marks what the op keeps
@pytest.mark.parametrize("case", [*linear_cases(), *conv2d_cases()], ids=lambda case: case.id)
def test_compiled_equals_eager(case):
    torch._dynamo.reset()
    ours = partial(case.ours, derive=False)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    inputs = case.inputs(2, torch.float32)
    assert_equal_bits(gradients(compiled, inputs), gradients(ours, inputs))
