"""What was not kept is recomputed in backward: once per backward, and freed after its last consumer."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from hf_actcompress.records import Derived, forget, stored_exact
from hf_actcompress.records.record import Recipe
from tests.oracle import counted
from tests.records.toys import SHAPE, KeepRecords, consume, leaf, produce, stock, two_consumers


def test_gradient_equals_stock():
    x = leaf()
    dz = torch.randn(SHAPE)
    ours = torch.autograd.grad(consume(produce(x)), x, dz)
    torch.testing.assert_close(ours, torch.autograd.grad(stock(x), x, dz))


def test_one_rebuild_per_backward_however_many_consumers():
    x, sin = leaf(), counted(torch.sin)
    z = two_consumers(x, sin)
    assert sin.calls == [0]
    z.sum().backward()
    assert sin.calls == [1]


def test_retain_graph_rebuilds_in_each_backward():
    x, sin = leaf(), counted(torch.sin)
    z = two_consumers(x, sin).sum()
    for count in (1, 2, 3):
        (dx,) = torch.autograd.grad(z, x, retain_graph=True)
        assert sin.calls == [count]
        torch.testing.assert_close(dx, 4 * torch.sin(2 * x.detach()))
    z.backward()


def test_rebuilt_value_dies_after_its_last_consumer():
    """It is gone before the producer's backward runs, and by reference count alone."""
    x, seen, alive = leaf(), [], []
    y = produce(x)
    z = consume(y, seen=seen) + consume(y, seen=seen)
    y.register_hook(lambda dy: alive.append([value() is not None for value in seen]))
    del y
    gc.disable()
    try:
        z.sum().backward()
    finally:
        gc.enable()
    assert len(seen) == 2 and alive == [[False, False]]


def test_partial_backward_leaves_nothing_rebuilt():
    """Only one of two consumers runs: the value waits for the other until the backward ends, and not longer."""
    x, seen, sin = leaf(), [], counted(torch.sin)
    y = produce(x, sin)
    a, b = consume(y, seen=seen), consume(y, seen=seen)
    gc.disable()
    try:
        torch.autograd.grad(a.sum(), x, retain_graph=True)
        assert len(seen) == 1 and seen[0]() is None
        torch.autograd.grad(b.sum(), x)
        assert len(seen) == 2 and seen[1]() is None and sin.calls == [2]
    finally:
        gc.enable()


def test_consumer_that_is_dropped_without_a_backward():
    x, seen = leaf(), []
    y = produce(x)
    a, b = consume(y, seen=seen), consume(y)
    del b
    a.sum().backward()
    assert seen[0]() is None


def test_gradient_accumulation_over_two_forwards():
    x, y = leaf(), leaf()
    for _ in range(2):
        two_consumers(x).sum().backward()
        (stock(y) * 0).sum().backward()
    torch.testing.assert_close(x.grad, 8 * torch.sin(2 * x.detach()))


def test_two_forwards_before_one_backward():
    a, b = leaf(), leaf()
    (two_consumers(a).sum() + two_consumers(b).sum()).backward()
    for x in (a, b):
        torch.testing.assert_close(x.grad, 4 * torch.sin(2 * x.detach()))


def test_backward_after_the_graph_was_freed_raises():
    x = leaf()
    z = two_consumers(x).sum()
    z.backward()
    with pytest.raises(RuntimeError, match="second time"):
        z.backward()


def test_exception_in_a_backward_then_another_backward():
    x, seen = leaf(), []
    y = produce(x)
    z = consume(y, seen=seen) + consume(y, seen=seen)

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    handle = y.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        z.sum().backward(retain_graph=True)
    handle.remove()
    z.sum().backward()
    torch.testing.assert_close(x.grad, 2 * torch.sin(2 * x.detach()))
    assert all(value() is None for value in seen)


def test_failing_recompute_reaches_the_caller_and_can_be_repeated():
    x, fail = leaf(), [True]

    def recompute(source: Tensor) -> Tensor:
        if fail[0]:
            raise ZeroDivisionError
        return torch.sin(source)

    z = two_consumers(x, recompute).sum()
    with pytest.raises(ZeroDivisionError):
        z.backward(retain_graph=True)
    fail[0] = False
    z.backward()
    torch.testing.assert_close(x.grad, 4 * torch.sin(2 * x.detach()))


def test_nested_derivations_are_each_rebuilt_once():
    x = leaf()
    first, second = counted(torch.sin), counted(torch.exp)
    inner = Derived(Recipe(first), (stored_exact(x.detach()),))
    outer = Derived(Recipe(second), (inner,))
    z = KeepRecords.apply(x, outer) + KeepRecords.apply(x, outer, inner) + KeepRecords.apply(x, inner)
    z.sum().backward()
    assert first.calls == [1] and second.calls == [1]
    s = torch.sin(x.detach())
    torch.testing.assert_close(x.grad, 3 + 2 * s + 2 * torch.exp(s))


def test_nested_and_viewed_values_die_after_their_last_consumer():
    x, died = leaf(), []

    def sin(source: Tensor) -> Tensor:
        value = torch.sin(source)
        died.append(weakref.ref(value))
        return value

    y = produce(x, sin)
    z = consume(y).sum() + consume(y.view(-1)).sum() + consume(y.t()).sum() + consume(y.view(-1)).sum()
    alive: list[bool] = []
    y.register_hook(lambda dy: alive.append(died[0]() is not None))
    del y
    gc.disable()
    try:
        z.backward()
    finally:
        gc.enable()
    assert len(died) == 1 and alive == [False]
    torch.testing.assert_close(x.grad, 4 * torch.sin(2 * x.detach()))


def test_one_consumer_that_keeps_one_record_twice():
    x, sin = leaf(), counted(torch.sin)
    record = Derived(Recipe(sin), (stored_exact(x.detach()),))
    KeepRecords.apply(x, record, record).sum().backward()
    assert sin.calls == [1]


@pytest.mark.parametrize("shown", [True, False])
def test_a_tensor_that_is_forgotten_after_a_write(shown: bool) -> None:
    """Backward reads what a write has made of the tensor only if no version counter shows the write."""
    x = leaf()
    y = produce(x)
    z = consume(y)
    with torch.no_grad():
        (y if shown else y.data).mul_(3)
    forget(y)
    (dx,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(dx, 2 * torch.sin(x.detach()) * (1 if shown else 3) * torch.cos(x.detach()))
