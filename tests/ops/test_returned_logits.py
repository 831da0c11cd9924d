"""Logits that left their model: for any use of them, values, gradients and errors are those of stock's logits."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import ops
from hf_actcompress.ops.logits_gradient import LogitsGradient
from tests.ops.logits_cases import ORDINARY, index, leaves, ours, stock
from tests.ops.loss_head_problem import wide
from tests.oracle import assert_within_law

pytestmark = pytest.mark.usefixtures("many_chunks")


@pytest.mark.parametrize("keep", (True, False), ids=("kept", "not kept"))
@pytest.mark.parametrize("name", ORDINARY)
def test_values_and_gradients_are_stocks(name: str, keep: bool) -> None:
    tensors = leaves()
    function = ORDINARY[name]
    results = []
    for logits in (ours(tensors, keep), stock(tensors), stock(tuple(wide(tensors)))):  # type: ignore[arg-type]
        found = ops.plain(function(logits))
        wanted = tensors if len(results) < 2 else None
        weights = torch.linspace(0.5, 2.0, found.numel(), dtype=found.dtype).view(found.shape)
        results.append((found, weights, wanted))
    (a, weights, _), (b, _, _), _ = results
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a, b) or not keep
    wide_tensors = tuple(wide(tensors))
    truth = function(stock(wide_tensors))  # type: ignore[arg-type]
    true_grads = torch.autograd.grad(truth, wide_tensors, weights.double())
    ours_grads, stock_grads = (torch.autograd.grad(y, tensors, weights) for y in (a, b))
    assert_within_law([a.detach(), *ours_grads], [b.detach(), *stock_grads], [truth.detach(), *true_grads])


def test_nothing_is_computed_for_slices_and_scales() -> None:
    logits = ours(leaves(), keep=False)
    part = (logits[:, :-1] / 0.7).float()[:, -2:]
    assert isinstance(part, ops.DeferredLogits) and not logits.chain.made
    part.log_softmax(-1).gather(-1, index()[:, :2, None]).sum().backward()
    assert not logits.chain.made and not part.chain.made


def test_what_reads_the_memory() -> None:
    tensors = leaves()
    a, b = ours(tensors), stock(tensors)
    assert isinstance(a, Tensor) and a.requires_grad and a.grad_fn is not None and not a.is_leaf
    assert a.tolist() == b.tolist() and a[0, 0, 0].item() == b[0, 0, 0].item()
    assert (a.detach().numpy() == b.detach().numpy()).all() and type(a.detach()) is Tensor
    assert type(a.data) is Tensor and torch.equal(a.data, b.data) and torch.equal(a.cpu(), b)
    assert repr(a).split("grad_fn")[0] == repr(b).split("grad_fn")[0]
    with pytest.raises(RuntimeError, match="requires grad"):
        a.numpy()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(a)
    assert torch.equal(copy.deepcopy(a.detach()), b)
    file = io.BytesIO()
    torch.save({"logits": a}, file)
    file.seek(0)
    loaded = torch.load(file)["logits"]
    assert type(loaded) is Tensor and torch.equal(loaded, b)
    assert torch.equal(pickle.loads(pickle.dumps(a)), b)
    with torch.no_grad():
        assert torch.equal(a.argmax(-1), b.argmax(-1)) and torch.equal(a.softmax(-1), b.softmax(-1))


def test_the_values_are_those_of_the_forward() -> None:
    tensors = leaves()
    kept, gone, expected = ours(tensors), ours(tensors, keep=False), stock(tensors).detach()
    later = kept / 2
    read_in_time = ours(tensors, keep=False)
    assert torch.equal(read_in_time, expected)
    with torch.no_grad():
        tensors[1].mul_(2.0)
    assert torch.equal(kept, expected) and torch.equal(later, expected / 2) and torch.equal(read_in_time, expected)
    with pytest.raises(RuntimeError, match=r"CompressionConfig\(logits=True\)"):
        gone.tolist()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.log_softmax(-1).sum().backward()


def test_new_data_of_the_weight_before_backward() -> None:
    tensors = leaves()
    grads = []
    for make, like in ((ours, tensors), (stock, tensors), (stock, wide(tensors))):
        fresh = tuple(x.detach().clone().requires_grad_() for x in like)
        loss = make(fresh)[:, 1:].log_softmax(-1).gather(-1, index()[:, 1:, None]).sum()  # type: ignore[arg-type]
        fresh[1].data = torch.zeros_like(fresh[1])
        grads.append(torch.autograd.grad(loss, fresh))
    assert_within_law(*grads)


def test_gradients_of_the_logits_themselves() -> None:
    tensors = leaves()
    results = []
    for make in (ours, stock):
        logits = make(tensors)
        scaled = logits[:, 1:] / 0.7
        loss = scaled.log_softmax(-1).gather(-1, index()[:, 1:, None]).sum() + 2 * scaled.logsumexp(-1).sum()
        results.append(torch.autograd.grad(loss, (logits, scaled)))
    for a, b in zip(*results, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        # the softmax is computed in chunks, so values are only close
        torch.testing.assert_close(a + 0, b, rtol=1e-6, atol=1e-7)
        assert (a.numpy() == (a + 0).numpy()).all() and (a.tolist(), repr(a)) == ((a + 0).tolist(), repr(a + 0))


def test_hooks_and_retained_gradients_are_plain() -> None:
    tensors = leaves()
    results = []
    for make in (ours, stock):
        logits = make(tensors)
        scaled = logits[:, 1:] / 0.7
        seen: list[Tensor] = []
        handle = logits.register_hook(seen.append)
        scaled.register_hook(lambda dy: dy * 3)
        scaled.retain_grad()
        scaled.log_softmax(-1).gather(-1, index()[:, 1:, None]).sum().backward(inputs=tensors)
        handle.remove()
        assert type(seen[0]) is Tensor and type(scaled.grad) is Tensor
        results.append((seen[0], scaled.grad, *(x.grad for x in tensors)))
        for x in tensors:
            x.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_backward_twice() -> None:
    tensors = leaves()
    loss = ours(tensors)[:, 1:].log_softmax(-1).gather(-1, index()[:, 1:, None]).square().sum()
    first = torch.autograd.grad(loss, tensors, retain_graph=True)
    second = torch.autograd.grad(loss, tensors)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, tensors)


def test_no_second_derivatives_in_silence() -> None:
    tensors = leaves()
    loss = ours(tensors).log_softmax(-1).square().sum()
    grads = torch.autograd.grad(loss, tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        sum(g.sum() for g in grads).backward()  # type: ignore[union-attr]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("keep", (True, False), ids=("kept", "not kept"))
def test_the_values_die_with_the_last_tensor_that_shows_them(keep: bool) -> None:
    logits = ours(leaves(), keep)
    values = weakref.ref(logits.chain.get())
    scaled = logits[:, 1:] / 0.7
    log_probs = scaled.log_softmax(-1)
    loss = log_probs.gather(-1, index()[:, 1:, None]).sum() - (log_probs.exp() * log_probs).sum(-1).sum()
    assert values() is not None
    del logits, scaled
    assert values() is not None  # log_probs may still be read
    del log_probs
    assert values() is None
    loss.backward()


@pytest.mark.usefixtures("no_collector")
def test_no_cycle_keeps_the_logits() -> None:
    logits = ours(leaves())
    alive = weakref.ref(logits)
    for name in ("set items", "in loops", "tanh after the model", "written through detached"):
        ORDINARY[name](ours(leaves()))
    logits.mul_(2.0)
    ops.plain(logits.exp() + logits.tanh())
    del logits
    assert alive() is None


def test_no_dense_gradient_on_the_way() -> None:
    """The autograd ops in between depend on torch's version. This test fails if there is one that we do not know."""
    seen: list[type] = []
    tensors = leaves(torch.bfloat16)
    names = ("in loops", "scale in place twice", "gaps between the rows", "entropy both ways", "clone and contiguous")
    for name in names:
        logits = ours(tensors)
        assert logits.grad_fn is not None
        logits.grad_fn.register_prehook(lambda grads: seen.append(type(grads[0])))
        # the variable is reused, so that the tensor that is written in place is the only one left
        logits = logits.float()
        ops.plain(ORDINARY[name](logits)).sum().backward()
    assert seen == [LogitsGradient] * len(names)


def test_targets_outside_the_vocabulary_raise() -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(ours(leaves()).view(30, 301), torch.full((30,), 301))
    with pytest.raises(RuntimeError, match="out of bounds"):
        ours(leaves()).gather(-1, torch.full((6, 5, 1), 301))
