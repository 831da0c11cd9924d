"""The loss head's op against torch's linear and cross_entropy: values, gradients, bytes."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import ops
from hf_actcompress.memory import allocator_trace
from hf_actcompress.memory.estimation.fake_step.cuda_rules import CudaCalls
from hf_actcompress.records import declare, dropping, frame, padding_of, record_of, stored_exact
from hf_actcompress.reference import linear_cross_entropy as reference
from tests.ops.contract_case import DTYPES
from tests.ops.loss_head_problem import problem, wide
from tests.oracle import EXACT, assert_within_law, held_bytes, nbytes

pytestmark = pytest.mark.usefixtures("many_chunks", "rows_computed")


def up(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def softcap(x: Tensor) -> Tensor:
    return torch.tanh(x / 3.0) * 3.0


def stock(h, weight, bias, target, pointwise=(), **options):
    logits = F.linear(h, weight, bias)
    for function in pointwise:
        logits = function(logits)
    return F.cross_entropy(logits, target, **options)


def ours(h, weight, bias, target, pointwise=(), logits=None, **options):
    return ops.linear_cross_entropy(h, weight, target, bias, pointwise=pointwise, logits=logits, **options)


def gradients(function, tensors, target, **options):
    leaves = [None if x is None else x.detach().clone().requires_grad_(x.requires_grad) for x in tensors]
    loss = function(*leaves, target, **options)
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    weights = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, wanted, weights)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("pointwise", ((), (up,), (softcap, up)), ids=("plain", "upcast", "softcap"))
def test_loss_from_logits_is_stocks_and_gradients_keep_the_law(dtype, reduction, pointwise):
    *tensors, target = problem(n=301, dtype=dtype)
    options = {"pointwise": pointwise, "reduction": reduction}
    expected = gradients(stock, tensors, target, **options)
    truth = gradients(stock, wide(tensors), target, **options)
    with torch.no_grad():
        logits = F.linear(*tensors)
    found = gradients(ours, tensors, target, logits=logits, **options)
    assert torch.equal(found[0], expected[0]) and found[0].dtype == expected[0].dtype
    assert_within_law(found, expected, truth)
    chunked = gradients(ours, tensors, target, **options)
    assert_within_law(chunked, expected, truth)


@pytest.mark.parametrize("kept", (1, 3, 9))
def test_few_targets_of_a_large_vocabulary(kept):
    """In fp32 a CPU multiplies few rows less exactly than stock's whole batch."""
    *tensors, target = problem(n=33, d=64, v=32_003, ignored=0.0)
    target[kept:] = -100
    expected = gradients(stock, tensors, target)
    truth = gradients(stock, wide(tensors), target)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found = gradients(ours, tensors, target)
        finally:
            torch.set_num_threads(1)
        assert_within_law(found, expected, truth)


@pytest.mark.parametrize("logits", (True, False))
def test_as_many_rows_as_there_are_targets_at_most(logits, rows_computed):
    *tensors, target = problem(n=64)
    count = int((target != -100).sum())
    with torch.no_grad():
        whole = F.linear(*tensors) if logits else None
    expected, truth = gradients(stock, tensors, target), gradients(stock, wide(tensors), target)
    for most in (count, count + 3, 64, 100):
        with Products() as products:
            found = gradients(ours, tensors, target, logits=whole, most=most)
        assert_within_law(found, expected, truth)
        assert max(products.rows) == (count if rows_computed == "rows with a target" else min(most, 64))
    if rows_computed == "all rows":
        with pytest.raises(IndexError):
            ours(*tensors, target, logits=whole, most=count - 1)


class Products(TorchDispatchMode):
    """The rows of the hidden states, or of their gradient, in each product."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm_.default):
            # the operand with 16 features has these rows
            self.rows += [x.size(0) for x in args[-2:] if x.dim() == 2 and x.size(1) == 16]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs", [n for n in itertools.product((True, False), repeat=3) if any(n)])
def test_only_the_gradients_that_are_needed(needs):
    *tensors, target = problem()
    for x, need in zip(tensors, needs, strict=True):
        x.requires_grad_(need)
    found = gradients(ours, tensors, target)
    assert_within_law(found, gradients(stock, tensors, target), gradients(stock, wide(tensors), target))
    assert len(found) == 1 + sum(needs)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(2, 200), st.booleans(), st.floats(0, 1))
def test_any_shape(n, d, v, biased, ignored):
    h, weight, bias, target = problem(n, d, v, torch.float64, ignored)
    tensors = [h, weight, bias if biased else None]
    expected, found = (gradients(function, tensors, target, reduction="sum") for function in (stock, ours))
    for a, b in zip(found, expected, strict=True):
        # fp64 against fp64: sums of at most a few thousand terms of size up to 10, in another order
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_every_target_ignored(reduction):
    *tensors, target = problem(ignored=1.1)
    assert (target == -100).all()
    for logits in (None, torch.zeros(37, 301)):
        found = gradients(ours, tensors, target, reduction=reduction, logits=logits)
        expected = gradients(stock, tensors, target, reduction=reduction)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("ignored", (7, 0))
def test_another_ignore_index_and_rows(ignored):
    h, weight, bias, _ = problem()
    target = torch.randint(0, 301, (20,))
    target[3] = ignored
    rows = torch.randperm(37)[:20]
    loss = ops.linear_cross_entropy(h, weight, target, bias, rows=rows, ignore_index=ignored, reduction="sum")
    expected = F.cross_entropy(F.linear(h, weight, bias)[rows], target, ignore_index=ignored, reduction="sum")
    grads = [torch.autograd.grad(x, (h, weight, bias)) for x in (loss, expected)]
    truth = F.cross_entropy(F.linear(*wide((h, weight, bias)))[rows], target, ignore_index=ignored, reduction="sum")
    assert abs(loss - truth) <= EXACT * max(abs(expected - truth), 2**-24 * truth)
    for a, b in zip(*grads, strict=True):
        # two fp32 sums of at most 301 terms
        assert (a - b).norm() <= 301 * 2**-24 * b.norm()


@pytest.mark.parametrize("target", (301, -3))
def test_a_target_outside_the_vocabulary_is_an_error(target, rows_computed):
    h, weight, bias, _ = problem()
    # if all rows are computed, the host does not read the targets, and torch's own kernel raises
    number = "" if rows_computed == "all rows" else f"{target} "
    with pytest.raises(IndexError, match=f"{number}is out of bounds"):
        ours(h, weight, bias, torch.full((37,), target))


def test_backward_twice_and_an_expanded_gradient():
    h, weight, bias, target = problem()
    losses = ours(h, weight, bias, target, reduction="none")
    before = [x.detach().clone() for x in (h, weight, bias)]
    dy = torch.ones(()).expand(37)
    first = torch.autograd.grad(losses, (h, weight, bias), dy, retain_graph=True)
    second = torch.autograd.grad(losses, (h, weight, bias), dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (h, weight, bias), strict=True))


def test_large_logits():
    """As in torch, max and log-sum are subtracted one after the other, because their sum would lose digits."""
    *tensors, target = problem(dtype=torch.float32)
    shifted = [*tensors[:2], (tensors[2].detach() + 1e5).requires_grad_()]
    found, expected = gradients(ours, shifted, target), gradients(stock, shifted, target)
    assert_within_law(found, expected, gradients(stock, wide(shifted), target))


def test_autocast(rows_computed):
    h, weight, bias, target = problem(n=200)
    results = []
    for function in (stock, ours):
        leaves = [x.detach().clone().requires_grad_() for x in (h, weight, bias)]
        # a GPU's autocast casts other tensors of a loss than a CPU's
        calls = CudaCalls() if rows_computed == "all rows" else nullcontext()
        with calls, torch.autocast("cpu", torch.bfloat16):
            loss = function(*leaves, target)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert results[1][0].dtype == results[0][0].dtype == torch.float32
    assert_within_law(results[1], results[0], gradients(stock, wide((h, weight, bias)), target))


@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_bytes_do_not_depend_on_the_vocabulary(dtype):
    kept = []
    for v in (500, 2000):
        *tensors, _ = problem(n=64, v=v, dtype=dtype)
        target = torch.arange(64).where(torch.arange(64) % 3 > 0, -100)
        kept.append(held_bytes(lambda t=tensors, y=target: ours(*t, y)))
    assert kept[0] == kept[1]
    assert kept[0] <= 64 * 16 * dtype.itemsize + 64 * 48 + 512


def test_hidden_states_that_are_derived_are_not_kept():
    *tensors, target = problem(n=64, d=128)
    source = tensors[0]

    def forward(derived: bool) -> Tensor:
        with frame():
            h = source * 2
            if derived:
                declare(h, lambda x: x * 2, stored_exact(source))
            return ours(h, *tensors[1:], target)

    assert held_bytes(lambda: forward(False)) - held_bytes(lambda: forward(True)) == 64 * 128 * 4
    plain, derived = (torch.autograd.grad(forward(way), tensors) for way in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain, derived, strict=True))


@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("whole", (True, False), ids=("logits", "no logits"))
def test_no_number_in_a_row_without_a_target(value, whole, rows_computed):
    *tensors, target = problem()
    target[5] = -100
    with torch.no_grad():
        tensors[0][5, 3] = value
        logits = F.linear(*tensors) if whole else None
    found, expected = gradients(ours, tensors, target, logits=logits), gradients(stock, tensors, target)
    assert found[0].isfinite() and expected[0].isfinite()
    for a, b in zip(found[1:], expected[1:], strict=True):
        # without the rows that have no target, gradients stay finite
        assert torch.equal(a.isnan(), b.isnan()) if rows_computed == "all rows" else a.isfinite().all()


def test_padding_that_comes_back_as_zeros():
    """In backward its logits no longer match its statistics, but its softmax must not overflow."""
    h, weight = torch.randn(2, 6, 16), torch.randn(301, 16)
    mask = torch.ones(2, 6)
    mask[:, 4:] = 0
    weight[:, 0] = 1.0
    h[:, 4:] = torch.nn.functional.one_hot(torch.zeros(2, 2, dtype=torch.int64), 16) * -200.0
    target = torch.randint(0, 301, (2, 6)).where(mask > 0, -100).view(-1)
    results = []
    for padding in (padding_of(mask), None):
        leaves = [h.clone().requires_grad_(), weight.clone().requires_grad_()]
        with frame(), dropping(padding):
            # a layer below the head keeps it
            record_of(leaves[0])
            loss = ours(leaves[0].view(12, 16), leaves[1], None, target)
        results.append(torch.autograd.grad(loss, leaves))
    for dropped, whole in zip(*results, strict=True):
        assert dropped.isfinite().all() and torch.equal(dropped, whole)


def test_peak_is_far_below_the_logits():
    *tensors, target = problem(n=256, v=8000)
    step = allocator_trace(lambda: ours(*tensors, target).backward())
    gradients_and_temporaries = nbytes(*tensors[1:]) + 2 * nbytes(tensors[0])
    assert step.peak_bytes - gradients_and_temporaries < 256 * 8000 * 4 / 4


def test_sums_are_as_wide_as_the_device_has_it():
    """MPS has no fp64."""
    dtypes = {name: reference._sum_dtype(SimpleNamespace(device=torch.device(name))) for name in ("cpu", "cuda", "mps")}
    assert dtypes == {"cpu": torch.float64, "cuda": torch.float64, "mps": torch.float32}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_a_product_is_added_by_its_own_kernel(dtype):
    """The kernel adds in fp32 into the sum itself. The product takes no memory and is not rounded to 16 bits."""
    dx, weight = torch.randn(64, 48, device="cuda").to(dtype), torch.randn(48, 80, device="cuda").to(dtype)
    before = torch.randn(64, 80, device="cuda")
    for way in (dx, dx.t().contiguous().t()):
        total = before.clone()
        reference._accumulate(total, way, weight)
        truth = before.double() + dx.double() @ weight.double()
        # the rounding of 48 products in fp32
        torch.testing.assert_close(total.double(), truth, rtol=0, atol=48 * 2**-23 * truth.abs().max().item())
