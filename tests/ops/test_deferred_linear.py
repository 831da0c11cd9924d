"""Deferred logits give the results of plain logits, for what models do between head and loss and for any other op."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import ops
from hf_actcompress.ops._deferred_linear import DeferredLogits
from tests.ops.contract_case import DTYPES
from tests.ops.loss_head_problem import problem, wide
from tests.oracle import assert_within_law

pytestmark = pytest.mark.usefixtures("many_chunks")


def deferred(keep=True, dtype=torch.float32):
    h, weight, bias, target = problem(n=360, dtype=dtype)
    return ops.deferred_linear(h.view(30, 12, 16), weight, bias, keep_logits=keep), (h, weight, bias), target


PATHS = {
    "flatten": lambda x, y: (x.float().view(-1, 301), y),
    "shift": lambda x, y: (x[..., :-1, :].contiguous().view(-1, 301), y.view(30, 12)[:, 1:].reshape(-1)),
    "shift and cast": lambda x, y: (x[:, 1:].float().reshape(-1, x.size(-1)), y.view(30, 12)[:, 1:].reshape(-1)),
    "last": lambda x, y: (x[:, -1], y[:30]),
    "softcap": lambda x, y: ((torch.tanh(x / 5.0) * 5.0).flatten(0, 1), y),
    "scale": lambda x, y: ((0.25 * x).view(360, -1), y),
}


@pytest.mark.parametrize("keep", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_what_models_do_between_head_and_loss(path, dtype, keep):
    logits, leaves, target = deferred(keep, dtype)
    input, labels = PATHS[path](logits, target)
    assert isinstance(input, DeferredLogits)
    loss = F.cross_entropy(input, labels)
    assert logits.chain.made == keep

    def plainly(h, weight, bias):
        plain_input, plain_labels = PATHS[path](F.linear(h.view(30, 12, 16), weight, bias), target)
        return F.cross_entropy(plain_input, plain_labels)

    values = []
    for tensors in (leaves, wide(leaves)):
        expected = plainly(*tensors)
        values.append([expected.detach(), *torch.autograd.grad(expected, tensors)])
    found = [loss.detach(), *torch.autograd.grad(loss, leaves)]
    if keep:
        assert torch.equal(loss, values[0][0])
    else:
        # a logit is a sum of 16 products, and the loss rounds four times more. Stock's own error is no bound, because a
        # single loss may be exact by chance
        largest = logits.detach().abs().max().item()
        assert abs(loss - values[1][0]) <= 20 * torch.finfo(dtype).eps * largest
    assert_within_law(found[1:], values[0][1:], values[1][1:])


OTHER_OPS = {
    "add a tensor": lambda x: (x + torch.arange(301)).logsumexp(-1),
    "in place": lambda x: x.mul_(2).add_(1).tanh(),
    "set item": lambda x: _set(x),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(30, 12, dtype=torch.int64)),
    "smoothing": lambda x: F.cross_entropy(x.view(-1, 301), torch.zeros(360, dtype=torch.int64), label_smoothing=0.1),
    "probabilities": lambda x: F.cross_entropy(x.view(-1, 301), torch.full((360, 301), 1 / 301)),
    "written, then loss": lambda x: F.cross_entropy(_set(x).view(-1, 301), torch.zeros(360, dtype=torch.int64)),
    "max": lambda x: x.max(-1).values,
    "own function": lambda x: _Square.apply(x.float().view(-1, 301)),
    "other dtype": lambda x: x.view(-1, 301).double().softmax(-1)[:, 5],
}


def _set(x):
    x[..., 3] = -1.0
    return x


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy * ctx.saved_tensors[0]


@pytest.mark.parametrize("name", OTHER_OPS)
def test_any_other_op_has_the_values_and_gradients_of_plain_logits(name):
    logits, leaves, _ = deferred()
    found = OTHER_OPS[name](logits)
    expected = OTHER_OPS[name](F.linear(leaves[0].view(30, 12, 16), *leaves[1:]))
    assert torch.equal(ops.plain(found), expected)
    grads = [torch.autograd.grad(x.sum(), leaves) for x in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_metadata_without_values():
    logits, _, _ = deferred()
    assert logits.shape == (30, 12, 301) and logits.dtype == torch.float32 and logits.requires_grad
    assert logits.device == torch.device("cpu") and "DeferredLogits" in repr(logits)
    assert not logits.chain.made


def test_plain_is_an_ordinary_differentiable_tensor():
    logits, leaves, _ = deferred()
    x = ops.plain(logits)
    assert type(x) is Tensor and ops.plain(x) is x
    expected = F.linear(leaves[0].view(30, 12, 16), *leaves[1:])
    assert torch.equal(x, expected)
    found, wanted = (torch.autograd.grad(y.square().sum(), leaves) for y in (x, expected))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("seen", ("nothing", "logits", "scaled", "rows", "view after"))
def test_values_are_written_over_only_where_nobody_can_ask_for_them(seen):
    """The test computes a softcap of logits while it still holds a tensor of an earlier step."""
    logits, (h, weight, bias), _ = deferred()
    head = F.linear(h.view(30, 12, 16), weight, bias).detach()
    scaled = logits / 5.0
    rows = logits[:, 3:] if seen == "rows" else None
    capped = torch.tanh(scaled) * 5.0
    held = {"logits": logits, "scaled": scaled, "rows": rows}.get(seen)
    source = logits.chain.source
    if seen != "logits":
        del logits
    if seen != "scaled":
        del scaled
    assert torch.equal(ops.plain(capped), torch.tanh(head / 5.0) * 5.0)
    if held is not None:
        expected = {"logits": head, "scaled": head / 5.0, "rows": head[:, 3:]}[seen]
        assert torch.equal(ops.plain(held), expected)
    # the head's own values exist as long as somebody may ask for them
    assert any(chain.parent is None and chain.made for chain in source.chains) == (seen in ("logits", "rows"))
    if seen == "view after":
        capped.view(-1)[0] = 7.0
        assert ops.plain(capped).view(-1)[0] == 7.0
