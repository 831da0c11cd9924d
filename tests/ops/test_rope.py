"""The rotary op compared with transformers' function, for all dtypes and memory orders; some calls use torch's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_actcompress import ops
from tests.oracle import assert_equal_bits, graph_nodes

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, S, D = 2, 7, 8


def heads(count: int, dtype: torch.dtype, order: str) -> Tensor:
    """A tensor [B, count, S, D] in the memory order of models, or in another."""
    if order == "dense":
        return torch.randn(B, count, S, D).to(dtype)
    if order == "expanded":
        return torch.randn(B, 1, S, D).to(dtype).expand(B, count, S, D)
    wide = torch.randn(B, S, (3 if order == "part" else 1) * count * D).to(dtype)
    return wide[..., : count * D].view(B, S, count, D).transpose(1, 2)


def results(function: object, q: Tensor, k: Tensor, *angles: Tensor, dys: tuple[Tensor, ...] = ()) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    ys = function(*leaves, *angles, unsqueeze_dim=1)
    dys = dys or tuple(torch.cos(torch.arange(y.numel())).view(y.shape).to(y.dtype) for y in ys)
    return [*ys, *torch.autograd.grad(ys, leaves, dys)]


@pytest.mark.parametrize("dtypes", list(itertools.product((FP32, BF16, FP16), repeat=2)), ids=str)
@pytest.mark.parametrize("order", ["dense", "heads after tokens", "part", "expanded"])
@pytest.mark.parametrize("batch", [1, B])
def test_bits_and_memory_order_are_stock_s(dtypes: tuple[torch.dtype, ...], order: str, batch: int) -> None:
    q, k = heads(4, dtypes[0], order), heads(2, dtypes[0], order)
    angles = [torch.randn(batch, S, D).to(dtypes[1]) for _ in range(2)]
    ours, stock = results(ops.rope, q, k, *angles), results(apply_rotary_pos_emb, q, k, *angles)
    assert_equal_bits(ours, stock)
    assert [y.stride() for y in ours[:2]] == [y.stride() for y in stock[:2]]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_odd_gradients(dtype: torch.dtype) -> None:
    """The gradients are expanded, or in another memory order with infinities and zeros."""
    q, k = heads(4, dtype, "heads after tokens"), heads(2, dtype, "dense")
    angles = [torch.randn(1, S, D).to(dtype) for _ in range(2)]
    odd = torch.randn(2, S, B, D).to(dtype).transpose(0, 2)
    odd[0, 0], odd[0, 1] = torch.inf, 0.0
    dys = torch.randn(B, 1, S, 1).to(dtype).expand(B, 4, S, D), odd.transpose(1, 2)
    ours, stock = (results(f, q, k, *angles, dys=dys) for f in (ops.rope, apply_rotary_pos_emb))
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wanted", [0, 1])
def test_a_frozen_one_s_output_wants_no_gradient(wanted: int) -> None:
    pair = [torch.randn(B, 3, S, D, requires_grad=i == wanted) for i in range(2)]
    cos, sin = torch.randn(2, 1, S, D)
    ys = ops.rope(*pair, cos, sin)
    assert [y.requires_grad for y in ys] == [i == wanted for i in range(2)]
    ys[wanted].sum().backward()
    assert pair[wanted].grad is not None and pair[1 - wanted].grad is None


def test_one_output_alone_is_used() -> None:
    q, k = (torch.randn(B, 3, S, D, requires_grad=True) for _ in range(2))
    ops.rope(q, k, *torch.randn(2, 1, S, D))[1].sum().backward()
    assert q.grad is None and k.grad is not None


def test_angles_are_kept_as_they_are_and_nothing_else() -> None:
    q, k = (torch.randn(B, 3, S, D, requires_grad=True) for _ in range(2))
    angles = torch.randn(2, 1, S, D).unbind()
    ys = ops.rope(q, k, *angles)
    (node,) = {y.grad_fn for y in ys}
    assert [x.data_ptr() for x in node.saved_tensors] == [x.data_ptr() for x in angles]


@pytest.mark.parametrize("which", [0, 1])
def test_angles_that_want_a_gradient(which: int) -> None:
    q, k = (torch.randn(B, 3, S, D, requires_grad=True) for _ in range(2))
    angles = [torch.randn(1, S, D, requires_grad=i == which) for i in range(2)]
    wanted = [q, k, angles[which]]
    grads = [
        torch.autograd.grad(sum(y.square().sum() for y in f(q, k, *angles)), wanted)
        for f in (ops.rope, apply_rotary_pos_emb)
    ]
    for ours, stock in zip(*grads, strict=True):
        torch.testing.assert_close(ours, stock)


@pytest.mark.parametrize("shape", [(B, S, D), (1, S, 1)])
def test_angles_of_other_shapes(shape: tuple[int, ...]) -> None:
    """More sequences of angles than of q and k need torch's graph, which sums. One angle for a whole head is ours."""
    q, k = (torch.randn(1, 3, S, D, requires_grad=True) for _ in range(2))
    angles = torch.randn(2, *shape).unbind()
    ours, stock = results(ops.rope, q, k, *angles), results(apply_rotary_pos_emb, q, k, *angles)
    assert_equal_bits(ours, stock)
    names = {node.name() for node in graph_nodes(ops.rope(q, k, *angles)[0])}
    assert ("RopeFunctionBackward" in names) is (shape[0] == 1)
