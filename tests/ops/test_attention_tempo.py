"""Eager attention that keeps its probabilities once, compared with the eager functions of transformers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama

from hf_actcompress.methods.tempo.op import attention_tempo
from tests.oracle import assert_equal_bits, assert_within_law, gradients, kept_bytes, nbytes, pattern

ROWS, WIDTH = 96, 64


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = {
    "bert": (modeling_bert.eager_attention_forward, {}),
    "gpt2": (modeling_gpt2.eager_attention_forward, {"probs_dtype": "value"}),
    "llama": (modeling_llama.eager_attention_forward, {"softmax_dtype": torch.float32, "probs_dtype": "query"}),
}
B, H, S, D = 2, 4, 24, 16


def relative(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]


class Module(nn.Module):
    """What the eager functions of transformers read from their module."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def attention_inputs(family: str, dtype: torch.dtype) -> list[Tensor]:
    kv = H // 2 if family == "llama" else H
    shapes = [(B, H, S, D), (B, kv, S, D), (B, kv, S, D)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def causal(dtype: torch.dtype) -> Tensor:
    return torch.full((S, S), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None].repeat(B, 1, 1, 1)


def joined(out: Tensor, weights: Tensor, with_weights: bool) -> Tensor:
    """[B, S, H, D] and, if they are to have a gradient too, the probabilities, as one tensor."""
    return torch.cat([out.flatten(), weights.flatten().to(out.dtype)]) if with_weights else out.contiguous()


def stock_attention(family: str, p: float, with_weights: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        torch.manual_seed(1)
        module = Module(q.size(1) // k.size(1)).train()
        out, weights = FAMILIES[family][0](module, q, k, v, mask, scaling=D**-0.5, dropout=p)
        return joined(out, weights, with_weights)

    return run


def our_attention(family: str, p: float, with_weights: bool = False) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        torch.manual_seed(1)
        named = {"query": q.dtype, "value": v.dtype}
        options = {key: named.get(value, value) for key, value in FAMILIES[family][1].items()}
        out, weights = attention_tempo(q, k, v, mask, D**-0.5, dropout=p, **options)
        return joined(out.transpose(1, 2), weights, with_weights)

    return run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention(family: str, p: float, dtype: torch.dtype, masked: bool) -> None:
    inputs = [*attention_inputs(family, dtype), *([causal(dtype)] if masked else [])]
    ours, stock = gradients(our_attention(family, p), inputs), gradients(stock_attention(family, p), inputs)
    assert torch.equal(ours[0], stock[0])
    if family != "llama" or dtype == torch.float32:
        assert_equal_bits(ours, stock)
    else:
        # ours rounds the probabilities once, to the query's dtype
        own = relative(stock[1:], exact := _attention_oracle(family, p, inputs))
        assert all(a < b + torch.finfo(dtype).eps / 2 for a, b in zip(relative(ours[1:], exact), own, strict=True))


def _attention_oracle(family: str, p: float, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients in fp64 with the same dropout mask: the mask of the narrow run, found from its own probabilities."""
    q, k, v, *mask = inputs
    torch.manual_seed(1)
    groups = q.size(1) // k.size(1)
    keep = functional.dropout(torch.ones(B, H, S, S, dtype=q.dtype), p).double() if p > 0 else 1.0

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(2, 3) * D**-0.5 + (mask[0].double() if mask else 0.0)
        return ((torch.softmax(scores, -1) * keep) @ v).transpose(1, 2).contiguous()

    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    return gradients(run, wide, pattern(torch.empty(B, S, H, D, dtype=q.dtype)).double())[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_returned_probabilities_are_stock_s_and_have_a_gradient(family: str) -> None:
    inputs = [*attention_inputs(family, torch.float32), causal(torch.float32)]
    ours = gradients(our_attention(family, 0.1, True), inputs)
    stock = gradients(stock_attention(family, 0.1, True), inputs)
    assert torch.equal(ours[0], stock[0])
    exact = [g.double() for g in stock[1:]]
    # the two gradients of the probabilities are added in another order
    assert max(relative(ours[1:], exact)) < 4 * torch.finfo(torch.float32).eps


def test_only_the_probabilities_have_a_gradient() -> None:
    q, k, v = attention_inputs("bert", torch.float32)
    (ours,) = torch.autograd.grad(attention_tempo(q, k, v, None, 0.25)[1].square().sum(), q)
    scores = (q @ k.transpose(2, 3)) * 0.25
    (stock,) = torch.autograd.grad(torch.softmax(scores, -1).square().sum(), q)
    torch.testing.assert_close(ours, stock)


def test_a_position_bias_has_its_gradient() -> None:
    q, k, v = attention_inputs("bert", torch.float32)
    bias = torch.randn(1, H, S, S, requires_grad=True)
    ours = gradients(our_attention("bert", 0.1), [q, k, v, bias])
    assert_equal_bits(ours, gradients(stock_attention("bert", 0.1), [q, k, v, bias]))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_under_autocast(family: str) -> None:
    inputs = [*attention_inputs(family, torch.float32), causal(torch.float32)]

    def autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*args: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*args)

        return run

    ours = gradients(autocast(our_attention(family, 0.1)), inputs)
    stock = gradients(autocast(stock_attention(family, 0.1)), inputs)
    assert torch.equal(ours[0], stock[0]) and ours[0].dtype == torch.bfloat16
    exact = gradients(stock_attention(family, 0.1), inputs)[1:]
    own = relative(stock[1:], exact)
    for a, b, grad in zip(relative(ours[1:], exact), own, ours[1:], strict=True):
        assert grad.dtype == torch.float32
        assert a < b + torch.finfo(torch.bfloat16).eps / 2


def attention_kept(function: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    # the inputs' own bytes exist before and are not counted
    return kept_bytes(lambda: function(*inputs))


@pytest.mark.daily(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_per_probability(dtype: torch.dtype) -> None:
    """Stock keeps probabilities, dropped ones and a mask (a byte on CUDA; on a CPU as wide as the values)."""
    inputs = attention_inputs("bert", dtype)
    count, width = B * H * S * S, dtype.itemsize
    state = torch.get_rng_state().numel()
    copies = 3 * nbytes(inputs[0])
    ours = attention_kept(our_attention("bert", 0.1), inputs)
    assert count * width + state <= ours <= count * width + state + copies
    assert attention_kept(our_attention("bert", 0.0), inputs) <= count * width + copies
    assert attention_kept(stock_attention("bert", 0.1), inputs) - ours >= 2 * count * width - state - copies


def test_llama_keeps_narrow_probabilities_and_unrepeated_heads() -> None:
    inputs = attention_inputs("llama", torch.bfloat16)
    count = B * H * S * S
    ours = attention_kept(our_attention("llama", 0.0), inputs)
    stock = attention_kept(stock_attention("llama", 0.0), inputs)
    # stock keeps fp32 probabilities, and k and v for every head
    assert stock - ours >= count * 4 + 2 * nbytes(inputs[0]) - nbytes(inputs[0])


def test_within_law_against_fp64() -> None:
    inputs = [*attention_inputs("bert", torch.bfloat16), causal(torch.bfloat16)]
    exact = _attention_oracle("bert", 0.1, inputs)
    ours, stock = (gradients(f("bert", 0.1), inputs)[1:] for f in (our_attention, stock_attention))
    assert_within_law(ours, stock, exact)
