"""Ops that look across rows, with padding rows dropped: attention, and a loss on some rows of a flattened input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import ops
from hf_actcompress.errors import PaddingError
from hf_actcompress.methods.norm_output.op import layer_norm_output
from hf_actcompress.methods.tempo.op import attention_tempo
from hf_actcompress.records import dropping, frame, padding_of, record_of
from tests.oracle import assert_equal_bits

B, H, S, D = 2, 4, 6, 8
RIGHT = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
LEFT = RIGHT.flip(1)
LOWEST = torch.finfo(torch.float32).min
Attend = Callable[..., Tensor]


def keys_hidden(mask: Tensor) -> Tensor:
    """A mask [B, 1, S, S] that is True for the keys to attend to."""
    return mask.bool()[:, None, None, :].expand(B, 1, S, S)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    return ops.fused_attention(q, k, v, mask, causal, None).transpose(1, 2)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: Any = None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal).transpose(1, 2)


def recomputed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    def attend(*args: Any) -> Tensor:
        return sdpa(*args, causal=causal)

    return ops.recomputed_attention(attend, q, k, v, mask, is_causal=causal)


def tempo(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    additive = mask
    if causal:
        mask = torch.ones(S, S, dtype=torch.bool).tril()[None, None]
    if mask is not None and mask.dtype == torch.bool:
        additive = torch.zeros(mask.shape).masked_fill(~mask, LOWEST)
    return attention_tempo(q, k, v, additive, D**-0.5)[0].transpose(1, 2)


OPS = {"fused": fused, "recomputed": recomputed, "tempo": tempo}
attends = pytest.mark.parametrize("attend", OPS.values(), ids=OPS)


def heads(seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """q, k, v as a projection of [B, S, H * D] gives them."""
    generator = torch.Generator().manual_seed(seed)
    rows = (scale * torch.randn(B, S, H, D, generator=generator) for _ in range(3))
    return [x.transpose(1, 2).requires_grad_() for x in rows]


def gradients(attend: Attend, qkv: list[Tensor], mask: Tensor | None, padding: Tensor | None, causal: bool = False):
    """Gradients for an output whose padding rows get no gradient, and the incoming gradient itself."""
    with frame(), dropping(padding_of(padding) if padding is not None else None):
        out = attend(*qkv, mask, causal)
    real = padding if padding is not None else torch.ones(B, S)
    dout = torch.sin(torch.arange(out.numel()).float()).view(out.shape) * (real != 0)[..., None, None]
    return torch.autograd.grad(out, qkv, dout), dout


def with_padding_kept(attend: Attend, qkv: list[Tensor], mask: Tensor | None, dout: Tensor, causal: bool = False):
    return torch.autograd.grad(attend(*qkv, mask, causal), qkv, dout)


@attends
@pytest.mark.parametrize("padding", [RIGHT, LEFT], ids=["right", "left"])
def test_padding_that_the_mask_hides(attend, padding):
    qkv, mask = heads(), keys_hidden(padding)
    ours, dout = gradients(attend, qkv, mask, padding)
    assert_equal_bits(ours, with_padding_kept(attend, qkv, mask, dout))


@attends
def test_an_additive_mask_of_lowest_values(attend):
    qkv, mask = heads(), torch.zeros(B, 1, S, S).masked_fill(~keys_hidden(RIGHT), LOWEST)
    ours, dout = gradients(attend, qkv, mask, RIGHT)
    assert_equal_bits(ours, with_padding_kept(attend, qkv, mask, dout))


@attends
def test_causal_calls_see_no_padding_on_the_right(attend):
    qkv = heads()
    ours, dout = gradients(attend, qkv, None, RIGHT, causal=True)
    assert_equal_bits(ours, with_padding_kept(attend, qkv, None, dout, causal=True))


@pytest.mark.parametrize("attend", [fused, recomputed], ids=["fused", "recomputed"])
def test_causal_calls_see_padding_on_the_left(attend):
    with pytest.raises(PaddingError, match="attend to padding"):
        gradients(attend, heads(), None, LEFT, causal=True)


@attends
def test_a_mask_that_shows_padding_to_real_tokens(attend):
    """The scores are so large that exp(-logsumexp) is zero, so no gradient would show the error."""
    mask = keys_hidden(RIGHT).clone()
    mask[1, 0, 2, 5] = True
    with pytest.raises(PaddingError, match="attend to padding"):
        gradients(attend, heads(scale=40.0), mask, RIGHT)


@attends
def test_without_a_mask_nothing_is_dropped(attend):
    qkv = heads()
    ours, dout = gradients(attend, qkv, None, RIGHT)
    assert_equal_bits(ours, with_padding_kept(attend, qkv, None, dout))


@attends
def test_a_length_that_equals_the_number_of_heads_without_a_mask(attend):
    """Then [B, H, S, D] looks like [B, S, ...], but no row of a head is a row of the batch."""
    padding = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    qkv = [x[:, :, :4].detach().requires_grad_() for x in heads()]
    with frame(), dropping(padding_of(padding)):
        out = attend(*qkv, None)
    assert_equal_bits(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(attend(*qkv, None).sum(), qkv))


@attends
def test_queries_of_another_sequence(attend):
    """Cross-attention: the keys have the length of the mask, or the queries do; nothing is dropped."""
    q, k, v = heads()
    for pair in ([q[:, :, :5], k, v], [q, k[:, :, :5], v[:, :, :5]]):
        qkv = [x.detach().requires_grad_() for x in pair]
        with frame(), dropping(padding_of(RIGHT)):
            out = attend(*qkv, None)
        assert_equal_bits(torch.autograd.grad(out.sum(), qkv), torch.autograd.grad(attend(*qkv, None).sum(), qkv))


@attends
def test_keys_that_someone_else_keeps_without_padding(attend):
    """Attention without a mask reads padding too, so it must not use such a record."""
    qkv = heads()
    with frame(), dropping(padding_of(RIGHT)):
        for x in qkv:
            rows = x.transpose(1, 2)
            record_of(rows)
        out = attend(*qkv, None)
        del rows
    dout = torch.ones_like(out)
    assert_equal_bits(torch.autograd.grad(out, qkv, dout), with_padding_kept(attend, qkv, None, dout))


def test_scores_of_padding_queries_may_be_anything():
    """The logsumexp of such a row may be -300. Then exp(300) is inf, and inf times a zero gradient would be NaN."""
    q, k, v = (x.detach() for x in heads())
    q, k = q.abs(), k.abs()
    q[1, :, 3:] = -300.0
    qkv = [x.requires_grad_() for x in (q, k, v)]
    mask = keys_hidden(RIGHT)
    ours, dout = gradients(fused, qkv, mask, RIGHT)
    assert_equal_bits(ours, with_padding_kept(fused, qkv, mask, dout))


@attends
def test_a_gradient_at_a_padding_query(attend):
    qkv = heads()
    with frame(), dropping(padding_of(RIGHT)):
        out = attend(*qkv, keys_hidden(RIGHT))
    with pytest.raises(PaddingError, match="drop_padding"):
        torch.autograd.grad(out, qkv, torch.ones_like(out))


def test_returned_probabilities_of_padding_queries():
    qkv = heads()
    additive = torch.zeros(B, 1, S, S).masked_fill(~keys_hidden(RIGHT), LOWEST)
    with frame(), dropping(padding_of(RIGHT)):
        _, probs = attention_tempo(*qkv, additive, 1.0)
    with pytest.raises(PaddingError, match="drop_padding"):
        torch.autograd.grad(probs.square().sum(), qkv)


@pytest.mark.parametrize("norm", [ops.layer_norm, layer_norm_output])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_norms_over_tokens_keep_them_all(norm, dims):
    """x [B, S, D] normalised over D, over S and D, or as a whole; the next layer rebuilds the output."""
    x, weight = torch.randn(B, S, D, requires_grad=True), torch.randn(3, D, requires_grad=True)
    shape = tuple(x.shape[-dims:])
    gain = torch.ones(shape, requires_grad=True)

    def run(drop: bool) -> Tensor:
        with frame(), dropping(padding_of(RIGHT) if drop else None):
            return ops.linear(norm(x + 0.0, shape, gain), weight)

    dy = torch.randn(B, S, 3).masked_fill((RIGHT == 0)[..., None], 0.0)
    ours, whole = (torch.autograd.grad(run(drop), (x, weight, gain), dy) for drop in (True, False))
    assert_equal_bits(ours, whole)


def head_loss(h: Tensor, weight: Tensor, target: Tensor, drop: bool, per_row: Tensor | None = None) -> Tensor:
    with frame(), dropping(padding_of(RIGHT) if drop else None):
        # a layer below the head keeps it
        record_of(h)
        losses = ops.linear_cross_entropy(h.view(-1, D), weight, target.view(-1), reduction="none")
    return (losses if per_row is None else losses * per_row).sum()


@pytest.mark.parametrize("masked", [2, 0])
def test_a_loss_on_some_rows_or_all(masked):
    """The loss may leave out other rows than those that are dropped. It must raise an error only for dropped rows."""
    h, weight = torch.randn(B, S, D, requires_grad=True), torch.randn(11, D, requires_grad=True)
    target = torch.arange(B * S).view(B, S) % 11
    target[0, :masked] = -100
    hidden = target.masked_fill(RIGHT == 0, -100)
    ours, stock = (torch.autograd.grad(head_loss(h, weight, hidden, drop), (h, weight)) for drop in (True, False))
    assert_equal_bits(ours, stock)
    with pytest.raises(PaddingError, match="drop_padding"):
        torch.autograd.grad(head_loss(h, weight, target, True), weight)
    # a dropped row whose loss has the weight zero raises no error
    per_row = (RIGHT != 0).float().view(-1)
    grads = [torch.autograd.grad(head_loss(h, weight, target, drop, per_row), (h, weight)) for drop in (True, False)]
    assert_equal_bits(*grads)
