"""What people do with logits outside of their model: functions of [6, 5, 301] logits, for `test_returned_logits`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import ops
from tests.ops.loss_head_problem import problem

Leaves = tuple[Tensor, Tensor, Tensor]


def leaves(dtype: torch.dtype = torch.float32) -> Leaves:
    h, weight, bias, _ = problem(n=30, dtype=dtype)
    return h, weight, bias


def ours(tensors: Leaves, keep: bool = True) -> Tensor:
    h, weight, bias = tensors
    logits = ops.returned_logits(ops.deferred_linear(h.view(6, 5, 16), weight, bias, keep_logits=keep))
    assert isinstance(logits, ops.DeferredLogits)
    return logits


def stock(tensors: Leaves) -> Tensor:
    return F.linear(tensors[0].view(6, 5, 16), *tensors[1:])


def index() -> Tensor:
    return (torch.arange(30) * 7 % 301).view(6, 5)


def set_items(x: Tensor) -> Tensor:
    x[:, 2] = 0.5
    x[x > 1.0] = -10.0
    return x.log_softmax(-1)


def write_in_a_view(x: Tensor) -> Tensor:
    part = x[:, :3]
    part.mul_(2.0)
    return x.logsumexp(-1) + part.sum()


def scale_in_place_twice(x: Tensor) -> Tensor:
    x /= 0.7
    x *= 1.25
    return F.cross_entropy(x[:, 1:].flatten(0, 1), index()[:, 1:].flatten())


def derived_before_a_write(x: Tensor) -> Tensor:
    half = x / 2
    x[..., 0] = 3.0
    return half.log_softmax(-1).sum() + x.log_softmax(-1).gather(-1, index()[..., None]).sum()


def derived_before_a_scale(x: Tensor) -> Tensor:
    half = x / 2
    x.mul_(3.0)
    return half.log_softmax(-1).exp() * x.log_softmax(-1)


def written_through_detached(x: Tensor) -> Tensor:
    x.detach()[:, 0] = 1.0
    return x.log_softmax(-1).square()


def derived_before_a_write_through_detached(x: Tensor) -> Tensor:
    third, seen = x / 3, x.detach()
    half, log_probs = x / 2, x.log_softmax(-1)
    seen[:, 1:] = 0.5
    return half.logsumexp(-1) + third.logsumexp(-1) + log_probs[..., 7] + (x / 5)[..., 3]


def written_through_data(x: Tensor) -> Tensor:
    x.data[:, 0] = 1.0
    return x.log_softmax(-1).gather(-1, index()[..., None])


def in_loops(x: Tensor) -> Tensor:
    rows = [torch.logsumexp(row, dim=-1) for row in x]
    parts = [part.log_softmax(-1).gather(-1, index()[:, :1, None]) for part in x.split(1, dim=1)]
    chunks = [part.softmax(-1).mean(-1) for part in x.chunk(2)]
    return torch.stack(rows).sum() + torch.cat(parts).square().sum() + torch.cat(chunks).sum()


def only_some_of_the_parts(x: Tensor) -> Tensor:
    return x.unbind(0)[1].logsumexp(-1) + x.unbind(1)[3][:5].logsumexp(-1)


def scattered_rows(x: Tensor) -> Tensor:
    log_probs = x[:, ::2].reshape(-1, 301).log_softmax(-1)
    # a sum, because a factor would multiply all gradients by its own rounding error, whose size is random
    return log_probs.gather(1, (torch.arange(18) * 5)[:, None]) + x[:, 1::2].flatten(0, 1).sum()


def entropy_both_ways(x: Tensor) -> Tensor:
    scaled = x[:, :-1] / 0.5
    p, log_p = scaled.softmax(-1), scaled.log_softmax(-1)
    return (p * log_p).sum(-1) + (p * scaled).sum(-1) - scaled.logsumexp(-1) + (p * p).sum(dim=-1, dtype=torch.float64)


# these functions must give the same values and gradients for our logits as for stock's
ORDINARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean over everything": lambda x: x.mean(),
    "mean over the vocabulary": lambda x: (x * x).mean(-1, keepdim=True) * x.mean(dim=(-1,), keepdim=True),
    "mean over tokens": lambda x: x.mean(1),
    "plus a tensor": lambda x: (x + torch.arange(301)).logsumexp(-1),
    "less its maximum": lambda x: (x - x.max(-1, keepdim=True).values).exp().sum(-1),
    "divided by a tensor": lambda x: (x / torch.full((6, 1, 1), 0.3)).log_softmax(-1),
    "mask": lambda x: x.masked_fill(torch.arange(301) % 3 == 0, -1e4).log_softmax(-1),
    "where": lambda x: torch.where(torch.arange(301) > 7, x, x.new_zeros(())).softmax(-1),
    "boolean index": lambda x: F.cross_entropy(x[index() % 2 == 0], index()[index() % 2 == 0]),
    "transposed": lambda x: F.cross_entropy(x.transpose(1, 2), index()),
    "class weights": lambda x: F.cross_entropy(
        x.flatten(0, 1), index().flatten(), weight=torch.arange(301, dtype=x.dtype)
    ),
    "joined": lambda x: torch.cat([x, x]).log_softmax(-1),
    "products": lambda x: x @ torch.linspace(0, 1, 301, dtype=x.dtype),
    "top": lambda x: x.topk(3).values,
    "sorted": lambda x: x.sort(-1, descending=True).values[..., 5],
    "another dimension": lambda x: x.log_softmax(1),
    "another dtype": lambda x: x.double().log_softmax(-1).gather(-1, index()[..., None]),
    "log_softmax in fp64": lambda x: F.log_softmax(x, dim=-1, dtype=torch.float64).gather(-1, index()[..., None]),
    "several of each row": lambda x: torch.gather(x.log_softmax(-1), -1, torch.arange(120).view(6, 5, 4)),
    "part of the rows by gather": lambda x: x.gather(-1, index()[:3, :2, None]),
    "nll": lambda x: F.nll_loss(F.log_softmax(x.view(30, 301), 1), index().view(30), reduction="sum"),
    "cross entropy, each": lambda x: F.cross_entropy(x.view(30, 301), index().view(30), reduction="none"),
    "cross entropy, ignored": lambda x: F.cross_entropy(x.view(30, 301), index().view(30), ignore_index=7),
    "set items": set_items,
    "write in a view": write_in_a_view,
    "scale in place twice": scale_in_place_twice,
    "derived before a write": derived_before_a_write,
    "derived before a scale": derived_before_a_scale,
    "written through detached": written_through_detached,
    "derived before a write through detached": derived_before_a_write_through_detached,
    "written through data": written_through_data,
    "in loops": in_loops,
    "only some of the parts": only_some_of_the_parts,
    "scattered rows": scattered_rows,
    "entropy both ways": entropy_both_ways,
    "negated": lambda x: -(-x).log_softmax(-1).gather(-1, index()[..., None]),
    "tanh after the model": lambda x: (torch.tanh(x / 3) * 3).log_softmax(-1).gather(-1, index()[..., None]),
    "gaps between the rows": lambda x: (
        x[:, ::2].reshape(-1, 301).log_softmax(-1).gather(1, index()[:, :3].reshape(18, 1))
    ),
    "squeezed": lambda x: x[:, :1].squeeze(1).logsumexp(-1),
    "clone and contiguous": lambda x: x.clone()[:, 1:].contiguous().view(-1, 301).logsumexp(1),
    "dtype and shape": lambda x: x.sum() * x.size(-1) * x.shape[0] * x.dim() / x.numel(),
    "in the same graph, used twice": lambda x: x.logsumexp(-1) * x.log_softmax(-1)[..., 3] * x[..., 0],
}
