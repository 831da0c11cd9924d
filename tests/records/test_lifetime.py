"""When an entry ends: with its tensor, its hooks, its frame, in_frame, its thread."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from hf_actcompress.records import frame, in_frame, live_entries, shared_derivation
from tests.records.toys import declared, is_derived


def test_hooks_are_a_boundary_in_and_out():
    y = declared(torch.randn(4, 6))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert not is_derived(y)
        inner = declared(torch.randn(4, 6))
        assert is_derived(inner)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not is_derived(inner)
        assert not is_derived(inner)
    assert not is_derived(inner) and not is_derived(y)
    assert live_entries() == 0


def test_hooks_with_a_recycled_id_are_a_boundary():
    for _ in range(20):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            inner = declared(torch.randn(4))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            assert not is_derived(inner)


def test_same_hooks_are_no_boundary():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = declared(torch.randn(4))
        assert is_derived(y) and is_derived(y)


def test_hooks_without_weak_references():
    class Pack:
        __slots__ = ()

        def __call__(self, x: Tensor) -> Tensor:
            return x

    with torch.autograd.graph.saved_tensors_hooks(Pack(), lambda t: t):
        y = declared(torch.randn(4))
        assert is_derived(y)
    assert not is_derived(y)


def test_disabled_hooks_are_no_error():
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert is_derived(declared(torch.randn(4)))


def test_frame_starts_empty_and_leaves_nothing():
    outside = declared(torch.randn(4))
    with frame():
        assert not is_derived(outside)
        inside = declared(torch.randn(4))
        assert is_derived(inside)
    assert not is_derived(inside)
    assert is_derived(outside)


def test_frame_ends_by_an_exception():
    held = []
    with pytest.raises(ZeroDivisionError), frame():
        held.append(declared(torch.randn(4)))
        raise ZeroDivisionError
    assert live_entries() == 0 and not is_derived(held[0])


def test_an_inner_frame_joins_the_outer_one():
    """What an inner model declares, such as its last norm, goes to the layers of the outer model."""
    assert not in_frame()
    with frame():
        a = declared(torch.randn(4))
        with frame():
            b = declared(torch.randn(4))
            assert is_derived(a) and is_derived(b)
        assert in_frame() and is_derived(a) and is_derived(b)
    assert not in_frame() and live_entries() == 0


def test_threads_have_registries_of_their_own():
    y = declared(torch.randn(4))
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(is_derived(y))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [False, False] and is_derived(y)


def test_tensor_that_dies_in_another_thread():
    held = [declared(torch.randn(4))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert live_entries() == 0


def test_entries_die_by_reference_count_alone():
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(4, 6)
        y = declared(x)
        shared_derivation(y.view(-1), "cast", Tensor.double)
        assert live_entries() == 1
        del y
        assert live_entries() == 0
    finally:
        gc.enable()
