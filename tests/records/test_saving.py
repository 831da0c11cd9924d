"""What is kept on the autograd nodes, and how it comes back: once per backward, and gone after it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from hf_actcompress.codecs import IDENTITY
from hf_actcompress.records import Derived, Stored, frame, live_entries, load, raw, record_of, save
from hf_actcompress.records.record import Recipe, leaves
from tests.oracle import counted, graph_nodes, kept_bytes, nbytes, tensors_in
from tests.records.toys import Half, consume, produce, stock

SHAPE = (16, 32)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*(shape or SHAPE), requires_grad=True)


def two_consumers(x: Tensor, recompute=torch.sin, seen=None) -> Tensor:
    y = produce(x, recompute)
    return consume(y, seen=seen) + consume(y, seen=seen) * 3


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


class _Nested(torch.autograd.Function):
    """Consumes any records; backward adds their values up."""

    @staticmethod
    def forward(ctx, x, *records):
        save(ctx, *records)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return (dy + sum(load(ctx)), *[None] * len(ctx.slots))


def test_nested_derivations_are_each_rebuilt_once():
    x = leaf()
    first, second = counted(torch.sin), counted(torch.exp)
    inner = Derived(Recipe(first), (raw(x.detach()),))
    outer = Derived(Recipe(second), (inner,))
    z = _Nested.apply(x, outer) + _Nested.apply(x, outer, inner) + _Nested.apply(x, inner)
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
    record = Derived(Recipe(sin), (raw(x.detach()),))
    _Nested.apply(x, record, record).sum().backward()
    assert sin.calls == [1]


def test_none_keeps_a_place():
    class Places(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            save(ctx, None, record_of(x), None)
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            first, x, last = load(ctx)
            assert first is None and last is None
            return dy * x

    x = leaf()
    Places.apply(x).sum().backward()
    assert torch.equal(x.grad, x.detach())


def test_each_tensor_is_saved_once():
    x = leaf()
    z = _Nested.apply(x, record_of(x), record_of(x), Derived(Recipe(torch.sin), (record_of(x),)))
    assert len(z.grad_fn.saved_tensors) == 1


def test_no_tensor_on_ctx():
    x = leaf()
    z = two_consumers(x) + consume(produce(leaf(), codec=Half()))
    checked = 0
    for node in graph_nodes(z):
        if hasattr(node, "slots"):
            assert list(tensors_in(vars(node))) == []
            checked += 1
    assert checked == 5


def test_walk_finds_what_it_looks_for():
    """The walk of the test above sees into partials, closures, slots and dataclasses."""
    from functools import partial

    x = torch.randn(2)
    recipes = [partial(torch.add, x), lambda: x, x.add, Stored(IDENTITY, (x,)), Derived(Recipe(x.add), ())]
    assert all(list(tensors_in({"a": [recipe]})) for recipe in recipes)


def test_kept_bytes_by_the_allocator():
    """x is kept, and neither y nor a copy of it, however many consumers."""
    x = leaf()

    def run() -> Tensor:
        h = -x
        y = produce(h)
        return consume(y) + consume(y) + consume(y.view(-1)).view(SHAPE)

    assert kept_bytes(run) == nbytes(x)


def test_no_grad_keeps_nothing():
    x = leaf()
    with torch.no_grad():
        assert kept_bytes(lambda: two_consumers(x)) == 0


def test_codec_is_packed_once_and_kept_instead_of_x():
    codec = Half()
    x = leaf()

    def run() -> Tensor:
        h = -x
        return consume(h, codec) + consume(h, codec) + consume(produce(h, codec=codec), codec)

    assert kept_bytes(run) == nbytes(x) // 2
    assert codec.log == ["pack"]


def test_codec_values_reach_backward():
    codec = Half()
    x = leaf()
    z = consume(x, codec) + consume(x.view(-1), codec).view(SHAPE)
    (dx,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(dx, 4 * x.detach().bfloat16().float())


def test_registry_empty_after_backward_and_after_a_frame_with_held_outputs():
    x = leaf()
    with frame():
        z = two_consumers(x)
    assert live_entries() == 0
    z.sum().backward()
    assert live_entries() == 0
    z = two_consumers(x)
    z.sum().backward()
    del z
    assert live_entries() == 0


def test_everything_dies_by_reference_count_alone():
    gc.collect()
    gc.disable()
    try:
        x = leaf()
        h = x * 1.0
        y = produce(h)
        z = consume(y) + consume(y.view(-1)).view(SHAPE) + consume(h, Half())
        alive = [weakref.ref(t) for t in (h, y, z)]
        z.sum().backward()
        del h, y, z
        assert [ref() for ref in alive] == [None] * 3
        h = x * 1.0
        z = two_consumers(h)
        alive = [weakref.ref(t) for t in (h, z)]
        del h, z
        assert [ref() for ref in alive] == [None] * 2
    finally:
        gc.enable()


def test_leaves_lists_every_kept_tensor():
    a, b = torch.randn(2), torch.randn(2)
    record = Derived(Recipe(torch.add), (raw(a), Derived(Recipe(torch.sin), (raw(b),))))
    assert [t is u for t, u in zip(leaves(record), (a, b), strict=True)] == [True, True]
