"""What is kept on the autograd nodes: each tensor once, through its codec, and nothing after the backward."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from hf_actcompress.codecs import IDENTITY
from hf_actcompress.records import Derived, Stored, declare, frame, live_entries, load, record_of, save, stored_exact
from hf_actcompress.records.record import Recipe, versions
from tests.oracle import graph_nodes, kept_bytes, nbytes, tensors_in
from tests.records.toys import SHAPE, Half, KeepRecords, consume, is_derived, leaf, produce, two_consumers


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
    z = KeepRecords.apply(x, record_of(x), record_of(x), Derived(Recipe(torch.sin), (record_of(x),)))
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


def test_versions_count_every_tensor_that_a_record_is_made_of():
    a, b = torch.randn(2), torch.randn(2)
    record = Derived(Recipe(torch.add), (stored_exact(a), Derived(Recipe(torch.sin), (stored_exact(b),))))
    b.mul_(2)
    assert list(versions(record)) == [0, 1]


def test_nothing_is_packed_before_somebody_saves_it():
    codec, x = Half(), leaf()
    y = torch.sin(x)
    declare(y, torch.sin, record_of(x, codec))
    assert codec.log == []
    z = KeepRecords.apply(x, record_of(y), record_of(x, codec))
    assert codec.log == ["pack"] and len(z.grad_fn.saved_tensors) == 1
    z.sum().backward()
    kept = x.detach().bfloat16().float()
    assert torch.equal(x.grad, torch.ones(SHAPE) + (torch.sin(kept) + kept))


def test_what_was_written_before_it_is_packed_is_not_derived_from():
    x = torch.randn(SHAPE)
    y = torch.sin(x)
    declare(y, torch.sin, record_of(x, Half()))
    assert is_derived(y)
    x.add_(1.0)
    assert not is_derived(y)
