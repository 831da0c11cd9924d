"""Activations without their padding rows: which values come back, what is kept, which gradients the guard refuses."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_actcompress.codecs import IDENTITY, Codec, Offload
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.errors import PaddingError
from hf_actcompress.methods.pooled.codec import Pooled
from hf_actcompress.methods.row_sample.codec import RowSample
from hf_actcompress.methods.row_sample.codec_gradient_norms import SiteNorms
from hf_actcompress.records import (
    dropping,
    encoded,
    frame,
    is_dropped,
    is_lossless,
    keep,
    live_entries,
    load,
    padding_in,
    padding_of,
    record_of,
    save,
    shared_copy,
    whole_record_of,
)
from tests.oracle import kept_bytes, nbytes, tensors_in
from tests.records.toys import value_of

B, S, D = 3, 8, 16
# on the right, on the left and in the middle
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 1, 1, 1]])
PADDED = (MASK == 0)[..., None]
REAL = int(MASK.sum())
# bytes of the order of the rows, which is kept once for all activations
ORDER = 8 * B * S


class _Linear(torch.autograd.Function):
    """y = x w^T. The backward computes dx, and dw from what is kept of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, codec: Codec = IDENTITY) -> Tensor:
        save(ctx, record_of(x, codec))
        ctx.w = w.detach()
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (x,) = load(ctx, dy)
        return dy @ ctx.w, dy.flatten(0, -2).t() @ x.reshape(-1, x.size(-1)), None


def dropping_rows(mask: Tensor = MASK) -> Any:
    return dropping(padding_of(mask))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, S, D, requires_grad=True), torch.randn(D, D, requires_grad=True)


def test_real_rows_come_back_and_padding_as_zeros():
    x = torch.randn(B, S, 2, D)
    with dropping_rows():
        record = record_of(x)
    assert torch.equal(value_of(record), x.masked_fill(PADDED[..., None], 0.0))
    assert is_lossless(record)


@pytest.mark.parametrize("name", CODECS)
def test_codecs_see_the_real_rows_alone(name):
    """Pooled codecs are the exception: they need the tokens of a sequence side by side, and keep them all."""
    codec, x = CODECS[name], torch.randn(B, S, 64)
    with dropping_rows():
        record = keep(x, codec)
        assert torch.equal(value_of(encoded(x, codec, x.dtype)).isfinite(), torch.ones_like(x, dtype=torch.bool))
    if isinstance(codec, Pooled):
        assert nbytes(*record.tensors) == codec.nbytes(x.shape, x.dtype)
        return
    stored = record.sources[0]
    assert nbytes(*stored.tensors) == codec.nbytes(torch.Size([REAL, 64]), x.dtype)
    back = value_of(record)
    assert back.masked_select(PADDED).count_nonzero() == 0
    assert torch.equal(back[MASK == 1], value_of(stored))


def test_a_codec_that_goes_by_position_sees_all_rows():
    x = torch.randn(B, S, 64)
    with dropping_rows():
        assert not is_dropped(keep(x, RowSample(0.3, norms=SiteNorms(4, S))))
        assert is_dropped(keep(x, Offload(RowSample(0.3))))


@pytest.mark.parametrize("mask", [torch.ones(B, S), torch.zeros(B, S)], ids=["none", "all"])
def test_nothing_to_drop(mask):
    assert padding_of(mask) is None


def test_only_rows_of_the_batch_are_dropped():
    with dropping_rows():
        for shape in [(B, S), (B, S + 1, D), (S, B, D), (B * S, D), (B, 2, S, D), (B, S, 0)]:
            x = torch.randn(shape)
            assert padding_in(x) is None
            assert record_of(x).tensors[0] is x
        assert padding_in(torch.randn(B, S, 1)) is not None
        with dropping(None):
            assert padding_in(torch.randn(B, S, D)) is None
        found = []
        thread = threading.Thread(target=lambda: found.append(padding_in(torch.randn(B, S, D))))
        thread.start()
        thread.join()
        assert found == [None]
    assert padding_in(torch.randn(B, S, D)) is None


def test_one_copy_for_all_consumers_and_views():
    x, w = inputs()

    def run(mask: Tensor = MASK) -> Tensor:
        with frame(), dropping_rows(mask):
            h = x + 1.0
            y = _Linear.apply(h, w) + _Linear.apply(h, w)
            heads = _Linear.apply(h.view(B, S, 4, 4), w[:4, :4]).reshape(B, S, D)
            return (y + heads).sum()

    # the sums keep nothing
    assert kept_bytes(run) == REAL * D * 4 + ORDER
    assert kept_bytes(lambda: run(torch.ones(B, S))) == B * S * D * 4
    assert live_entries() == 0


def test_a_cast_copy_and_a_whole_record():
    x = torch.randn(B, S, D)
    with frame(), dropping_rows():
        copies = [shared_copy(x, "cast", lambda: x.bfloat16()) for _ in range(2)]
        assert copies[0] is copies[1]
        assert copies[0].sources[0].tensors[0].shape == (REAL, D)
        assert value_of(whole_record_of(x)) is x
        record_of(x)
        assert value_of(whole_record_of(x)) is x


def gradients(dy: Tensor, mask: Tensor = MASK, codec: Codec = IDENTITY) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x, w = inputs()
    with frame(), dropping_rows(mask):
        y = _Linear.apply(x, w, codec)
    return torch.autograd.grad(y, (x, w), dy)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_exact_where_no_gradient_reaches_padding(layout):
    dy = torch.randn(B, S, 1 if layout == "expanded" else D).masked_fill(PADDED, 0.0)
    dy = dy.transpose(0, 1).contiguous().transpose(0, 1) if layout == "transposed" else dy.expand(B, S, D)
    for ours, plain in zip(gradients(dy), gradients(dy, torch.ones(B, S)), strict=True):
        assert torch.equal(ours, plain)


def test_a_gradient_that_reaches_padding_raises_and_names_the_option():
    dy = torch.zeros(B, S, D)
    dy[1, 1, 3] = 1e-30
    with pytest.raises(PaddingError, match=r"drop_padding=True .* 1e-30"):
        gradients(dy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_overflow_is_left_to_loss_scaling(bad):
    """The overflow reaches the gradients, where a GradScaler finds it, as in stock."""
    dy = torch.randn(B, S, D).masked_fill(PADDED, 0.0)
    dy[0, 7, 2] = bad
    ours, stock = gradients(dy), gradients(dy, torch.ones(B, S))
    assert not ours[1][2].isfinite().any() and not stock[1][2].isfinite().any()
    assert torch.equal(ours[1][0], stock[1][0])


def test_every_backward_is_looked_at():
    """The graph can be used again after a good backward and after a bad one. A later graph is not affected."""
    x, w = inputs()
    with frame(), dropping_rows():
        y = _Linear.apply(x, w)
    good = torch.randn(B, S, D).masked_fill(PADDED, 0.0)
    for _ in range(2):
        torch.autograd.grad(y, (x, w), good, retain_graph=True)
        with pytest.raises(PaddingError):
            torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    torch.autograd.grad(y, (x, w), good)
    gradients(good)


def test_no_tensor_stays_outside_of_what_is_saved():
    """No tensor is on ctx or in the guard, before, between and after backwards."""
    x, w = inputs()
    with frame(), dropping_rows():
        y = _Linear.apply(x, w)
    for _ in range(2):
        assert not list(tensors_in((y.grad_fn.slots, y.grad_fn.dropped)))
        torch.autograd.grad(y, (x, w), torch.zeros(B, S, D), retain_graph=True)
    assert not list(tensors_in((y.grad_fn.slots, y.grad_fn.dropped)))
    assert list(tensors_in(y.grad_fn.saved_tensors))


def test_bad_rows_in_the_first_of_many_layers_are_enough():
    x, w = inputs()
    with frame(), dropping_rows():
        first = _Linear.apply(x, w)
        second = _Linear.apply(first, w)
    with pytest.raises(PaddingError):
        (second.masked_fill(PADDED, 0.0).sum() + first[0, -1, 0]).backward()


def test_two_batches_in_one_backward_keep_their_own_padding():
    x, w = inputs()
    masks = [MASK, MASK.roll(1, 0)]
    outs = []
    for mask in masks:
        with frame(), dropping_rows(mask):
            outs.append(_Linear.apply(x, w).masked_fill((mask == 0)[..., None], 0.0).square().sum())
    ours = torch.autograd.grad(sum(outs), (x, w))
    plain = [(x @ w.t()).masked_fill((mask == 0)[..., None], 0.0).square().sum() for mask in masks]
    for a, b in zip(ours, torch.autograd.grad(sum(plain), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_dropped_in_a_checkpointed_region(reentrant):
    """The recomputation knows no padding and must save the same tensors. Around the region rows are dropped."""
    x, w = inputs()
    found = []

    def region(h: Tensor) -> Tensor:
        found.append(padding_in(h) is not None and torch.is_grad_enabled())
        return _Linear.apply(h, w)

    with frame(), dropping_rows():
        h = _Linear.apply(x, w)
        h = checkpoint(region, h, use_reentrant=reentrant)
        y = _Linear.apply(h, w)
        found.append(padding_in(y) is not None)
    dy = torch.randn(B, S, D).masked_fill(PADDED, 0.0)
    ours = torch.autograd.grad(y, (x, w), dy) if not reentrant else None
    if reentrant:
        y.backward(dy)
        ours = (x.grad, w.grad)
    assert found == [False, True, False]
    stock = torch.autograd.grad(x @ w.t() @ w.t() @ w.t(), (x, w), dy)
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b)


def test_dropping_goes_on_under_hooks_that_offload():
    x, w = inputs()
    with torch.autograd.graph.save_on_cpu(), frame(), dropping_rows():
        y = _Linear.apply(x, w)
        assert padding_in(y) is not None
    with pytest.raises(PaddingError):
        y.sum().backward()


def test_an_op_that_hides_its_gradient_from_the_guard_is_found():
    class Careless(_Linear):
        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
            (x,) = load(ctx)
            return dy * x, None, None

    x, w = inputs()
    with frame(), dropping_rows():
        y = Careless.apply(x, w)
    with pytest.raises(AssertionError, match="incoming gradient"):
        y.sum().backward()
