"""The net under all rules: what stock code saves is kept in fewer bytes, with stock's bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.codecs import IDENTITY
from hf_actcompress.records import frame, live_entries
from hf_actcompress.records.net import netted
from tests.oracle import assert_equal_bits, kept_bytes

SHAPE = (24, 32)


@contextmanager
def net() -> Iterator[None]:
    with frame(), netted(IDENTITY):
        yield


@contextmanager
def stock() -> Iterator[None]:
    yield


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SHAPE, generator=generator).abs().add_(0.1).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(32, 32, generator=generator).to(dtype).requires_grad_()
    return a, b, weight


def assert_same(forward: Callable[[], Tensor], over: tuple[Tensor, ...]) -> None:
    """Loss and gradients are stock's bits, in a second backward too, and where only some are asked for."""
    results = []
    for around in (stock, net):
        torch.manual_seed(3)
        with around():
            loss = forward()
        first = torch.autograd.grad(loss, over, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, over[-1:], retain_graph=True)
        results.append([loss, *(g for g in (*first, *again) if g is not None)])
        assert_equal_bits([first[-1]], again)
    assert_equal_bits(*results)
    assert live_entries() == 0


def kept(forward: Callable[[], Tensor], around: Callable[[], object]) -> int:
    def run() -> Tensor:
        with around():  # type: ignore[attr-defined]
            return forward()

    return kept_bytes(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_functional_dropout_are_bits(dtype: torch.dtype) -> None:
    a, _, weight = inputs(dtype)

    def forward() -> Tensor:
        return (F.dropout(F.gelu(a + 1), 0.3) @ weight).sum()

    assert_same(forward, (a, weight))
    # the mask of stock's dropout is as large as its input on a CPU
    assert kept(forward, stock) - kept(forward, net) == a.nbytes - a.numel() // 8


def test_a_product_that_looks_like_a_dropout_is_none() -> None:
    a, _, weight = inputs()
    mask = torch.rand(SHAPE).round()

    def forward() -> Tensor:
        x = a + 1
        return ((F.dropout(x, 0.5) + x * mask) @ weight).sum()

    assert_same(forward, (a, weight))


def test_a_write_in_place_is_stocks_error() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        h = x + 1
        y = h @ weight
        h.add_(1)
        return y.sum()

    for around in (stock, net):
        a, _, weight = inputs()
        with around():
            loss = forward(a, weight)
        with pytest.raises(RuntimeError, match="inplace operation.*is at version 1; expected version 0"):
            loss.backward()


def test_nothing_outlives_the_graph() -> None:
    """No cycle through a node's own output, with a result that is saved by the node that makes it."""
    a, _, weight = inputs()
    gc.disable()
    try:
        with net():
            y = (a @ weight).sigmoid()
            z = F.silu(y) * y
            loss = (z @ weight).sum()
        references = [weakref.ref(x) for x in (y, z)]
        storage = weakref.ref(z.untyped_storage())
        del y, z, loss
        assert all(reference() is None for reference in references) and storage() is None
    finally:
        gc.enable()
    assert live_entries() == 0


def test_indices_of_a_max_pooling_take_fewer_bytes() -> None:
    a = torch.randn(2, 8, 24, 24, requires_grad=True)

    def forward() -> Tensor:
        return F.max_pool2d((a + 1).sin(), 3, 2, 1).sum()

    assert_same(forward, (a,))
    # 6 of the 8 bytes of an index
    assert kept(forward, stock) - kept(forward, net) == 6 * 2 * 8 * 12 * 12
