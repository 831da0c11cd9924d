"""Records under checkpointing, offloading hooks, threads, interleaved models and exceptions."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_actcompress.records import Derived, frame, live_entries, record_of
from tests.oracle import assert_equal_bits, kept_bytes, nbytes
from tests.records.toys import SHAPE, consume, leaf, produce, two_consumers


class Block(nn.Module):
    """A producer with two consumers, on x times a parameter, in plain torch or with records."""

    def __init__(self, recorded: bool) -> None:
        super().__init__()
        # not the default generator, because threads share it
        self.weight = nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)))
        self.recorded = recorded

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.weight
        if not self.recorded:
            y = torch.sin(h)
            return y * y + y * y * 3
        return two_consumers(h)


def wrapped_gradients(run, recorded: bool) -> list[Tensor]:
    block, x = Block(recorded), torch.linspace(-1, 1, 512).view(SHAPE).requires_grad_()
    run(block, x).sum().backward()
    return [x.grad, block.weight.grad]


def run_saved_on_cpu(block: Block, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def run_in_nested_hooks(block: Block, x: Tensor) -> Tensor:
    def hooks():
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float())

    with hooks():
        y = block(x)
        with hooks(), torch.autograd.graph.save_on_cpu():
            z = block(y)
        return block(z)


WRAPPERS = {
    "plain": lambda block, x: block(x),
    "checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "checkpoint twice": lambda block, x: checkpoint(
        block, checkpoint(block, x, use_reentrant=False), use_reentrant=False
    ),
    "checkpoint in checkpoint": lambda block, x: checkpoint(
        lambda x: checkpoint(block, block(x), use_reentrant=False), x, use_reentrant=False
    ),
    "checkpoint between": lambda block, x: block(checkpoint(block, block(x), use_reentrant=False)),
    "reentrant between": lambda block, x: block(checkpoint(block, block(x), use_reentrant=True)),
    "save_on_cpu": run_saved_on_cpu,
    "nested hooks": run_in_nested_hooks,
}


@pytest.mark.parametrize("run", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_gradients_under_wrappers(run):
    ours, theirs = wrapped_gradients(run, True), wrapped_gradients(run, False)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert_equal_bits(ours, wrapped_gradients(run, True))
    assert live_entries() == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_its_input_alone(reentrant):
    """Records must hold neither tensors from inside of the region nor, in the region, sources from outside."""
    block, x = Block(True), leaf()
    z = []

    def run() -> Tensor:
        h = x * 1.0
        y = produce(h)
        with frame():
            z.append(checkpoint(block, y, use_reentrant=reentrant))
        return z.pop()

    # h for the producer, y for the checkpoint; the rest is the RNG state that checkpoint stashes
    assert 2 * nbytes(x) <= kept_bytes(run) <= 2 * nbytes(x) + 3 * torch.get_rng_state().numel()


@pytest.mark.parametrize("early_stop", [False, True])
def test_checkpoint_recomputation_saves_as_many_tensors_as_the_forward(early_stop):
    """This includes a region whose input was declared outside. checkpoint itself counts, and raises if they differ."""
    x, block = leaf(), Block(True)
    y = produce(x)

    def region(y: Tensor) -> Tensor:
        return consume(block(consume(y)) * y)

    z = consume(checkpoint(region, y, use_reentrant=False, early_stop=early_stop))
    (dx,) = torch.autograd.grad(z.sum(), x)
    z = consume(region(produce(x)))
    assert torch.equal(dx, torch.autograd.grad(z.sum(), x)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_records_do_not_cross_into_a_region_or_its_recomputation(reentrant):
    x, inside, after = leaf(), [], []

    def region(y: Tensor) -> Tensor:
        # the reentrant kind runs its forward without grad, where no op asks for a record
        inside.append(torch.is_grad_enabled() and isinstance(record_of(y), Derived))
        return produce(y) if torch.is_grad_enabled() else torch.sin(y)

    with frame():
        y = produce(x)
        z = checkpoint(region, y, use_reentrant=reentrant)
        after.append(isinstance(record_of(z), Derived))
        z = consume(z)
    z.sum().backward()
    assert inside == [False, False] and after == [False]
    assert live_entries() == 0


def test_rebuilt_under_two_backwards_at_once():
    """Two threads go through one graph: each gets its own value, and none stays."""
    import threading

    x, seen = leaf(), []
    z = two_consumers(x, seen=seen).sum()
    expected = 4 * torch.sin(2 * x.detach())
    errors: list[float] = []
    start = threading.Barrier(2)

    def run() -> None:
        start.wait()
        for _ in range(20):
            (dx,) = torch.autograd.grad(z, x, retain_graph=True)
            errors.append((dx - expected).abs().max().item())

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 40 and max(errors) < 1e-5
    gc.collect()
    assert all(value() is None for value in seen)


def test_two_threads_train_at_once():
    import threading

    expected = wrapped_gradients(WRAPPERS["checkpoint between"], True)
    results: list[list[Tensor]] = []

    def run() -> None:
        results.extend(wrapped_gradients(WRAPPERS["checkpoint between"], True) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 10
    for grads in results:
        torch.testing.assert_close(grads, expected)


def test_two_models_interleaved():
    """The forwards of two models are interleaved, and their backwards run one after the other."""
    a, b = Block(True), Block(True)
    x = leaf()
    with frame():
        ya = a(x)
        with frame():
            yb = b(x)
        za = a(ya)
    with frame():
        zb = b(yb)
    (grad_a,) = torch.autograd.grad(za.sum(), a.weight, retain_graph=True)
    (grad_b,) = torch.autograd.grad(zb.sum(), b.weight)
    assert torch.equal(grad_a, grad_b)


def test_exception_in_the_middle_of_a_forward():
    x, held = leaf(), []
    with pytest.raises(ZeroDivisionError), frame():
        h = x * 1.0
        held.append(produce(h))
        raise ZeroDivisionError
    assert live_entries() == 0
    alive = weakref.ref(h)
    del h
    held.clear()
    gc.collect()
    assert alive() is None
