"""Gated delta nets whose backward runs in segments of tokens: values and gradients are stock's, the peak is lower."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next

from hf_actcompress import CompressionConfig, kept_bytes, measure_step, patch_model
from hf_actcompress.models import linear_attention
from hf_actcompress.models.linear_attention import copy_in_segments
from hf_actcompress.ops import linear_attention as in_segments
from tests.families import relative_error
from tests.oracle import EXACT, assert_equal_bits

pytestmark = pytest.mark.skipif(
    not hasattr(modeling_qwen3_next, linear_attention.NAME), reason="this transformers has no such function"
)
HIDDEN = 32
CONFIG = CompressionConfig(tiled_mlp=64)


def build(layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    config = hf.Qwen3NextConfig(
        **{
            "vocab_size": 64, "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "mlp_only_layers": list(range(layers)),
            "layer_types": ["linear_attention", "full_attention"][:layers], **options,
        }
    )  # fmt: skip
    return hf.Qwen3NextForCausalLM(config).train()


def step(model: Any, tokens: int = 150, mode: str = "fp32") -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), grads


def inputs(tokens: int = 150) -> list[Tensor]:
    """Queries, keys, values, decays and beta (how much a token writes), with two heads of values per head of keys."""
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, tokens, heads, 8, generator=g) for heads in (2, 2, 4))
    decay, beta = -torch.rand(2, tokens, 4, generator=g), torch.rand(2, tokens, 4, generator=g)
    return [q, k, v, decay, beta]


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, computed token by token."""
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(2, dim=2) for x in (q, k))
    state, outs = q.new_zeros(2, 4, 8, 8), []
    for t in range(q.size(1)):
        state = state * decay[:, t, :, None, None].exp()
        new = (v[:, t] - (state * k[:, t, :, :, None]).sum(-2)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * new[:, :, None]
        outs.append((state * q[:, t, :, :, None]).sum(-2) * 8**-0.5)
    return torch.stack(outs, 1), state


def stocks(*given: Any) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = given if len(given) == 6 else (*given, None)
    rule: Any = getattr(modeling_qwen3_next, linear_attention.NAME)
    # not every transformers repeats them inside
    q, k = (x.repeat_interleave(2, dim=2) for x in (q, k))
    found: tuple[Tensor, Tensor] = rule(
        q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return found


RUNS: Any = ((recurrent, torch.float64), (stocks, torch.float32), (partial(in_segments, stocks, 64), torch.float32))


@pytest.mark.parametrize("reads", ["both", "output", "state"])
@pytest.mark.parametrize("frozen", [None, 1])
def test_gradients_against_the_recurrence_in_fp64(reads: str, frozen: int | None) -> None:
    results = []
    for run, dtype in RUNS:
        leaves = [x.to(dtype).requires_grad_(i != frozen) for i, x in enumerate(inputs())]
        out, state = run(*leaves)
        loss = out.expand(2, *out.shape).sin().sum() if reads != "state" else state.square().sum()
        loss = loss + state.sum() if reads == "both" else loss
        for _ in range(2):
            loss.backward(retain_graph=True)
        grads = {str(i): x.grad for i, x in enumerate(leaves) if x.grad is not None and x.grad.any()}
        results.append(([out.detach(), state.detach()], grads))
    (truth, oracle), (values, stock), (found, ours) = results
    assert_equal_bits(found, values)
    torch.testing.assert_close([x.double() for x in found], truth, rtol=1e-4, atol=1e-5)
    assert ours.keys() == oracle.keys() == stock.keys()
    assert relative_error(ours, oracle) <= EXACT * relative_error(stock, oracle)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
def test_a_model_is_stocks(mode: str, checkpointing: bool | None) -> None:
    stock = build().to(torch.bfloat16 if mode == "bf16" else torch.float32)
    if checkpointing is not None:
        stock.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    (loss, expected), (found, grads) = (
        step(stock, mode=mode),
        step(patch_model(copy.deepcopy(stock), CONFIG), mode=mode),
    )
    assert torch.equal(found, loss)
    assert grads.keys() == expected.keys()
    assert relative_error(grads, expected) < (1e-5 if mode == "fp32" else 2e-2)


def test_which_calls_go_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with few tokens, without gradients or without tiles do not go in segments."""
    kind, calls = type(build().model.layers[0].linear_attn), []
    monkeypatch.setattr(
        linear_attention.ops, "linear_attention", lambda *args: calls.append(args[1]) or in_segments(*args)
    )
    assert copy_in_segments(kind, 64) is not None and copy_in_segments(kind, 0) is None
    model = patch_model(build(), CompressionConfig(tiled_mlp=65))
    step(model, tokens=128)
    with torch.no_grad():
        model(input_ids=torch.ones(1, 300, dtype=torch.long))
    step(patch_model(build(), "exact"))
    assert not calls
    step(model, tokens=129)
    assert set(calls) == {128}


def test_the_peak_of_a_checkpointed_layer() -> None:
    """In bytes per token and channel. Stock's peak includes what the rule computes for all tokens at once."""
    peaks = []
    for config in (None, CompressionConfig(plans=False), CONFIG):
        model = build(layers=1)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config is not None:
            patch_model(model, config)
        ids = torch.randint(3, 64, (1, 2048), generator=torch.Generator().manual_seed(1))
        run = partial(lambda model, ids: model.model(input_ids=ids).last_hidden_state.sum().backward(), model, ids)
        run()
        peaks.append(measure_step(run, "cpu").peak_bytes / ids.numel() / HIDDEN)
    assert peaks[2] < 0.55 * min(peaks[:2])


def test_a_plan_runs_it_as_one_node() -> None:
    """A layer under "long" keeps no more than one under "exact"."""
    kept = {}
    for preset in ("exact", "long"):
        model = patch_model(build(), CompressionConfig() if preset == "exact" else CONFIG)
        ids = torch.randint(3, 64, (2, 150), generator=torch.Generator().manual_seed(1))
        model(input_ids=ids, labels=ids).loss.backward()
        kept[preset] = kept_bytes(lambda model=model, ids=ids: model(input_ids=ids, labels=ids).loss, "cpu")
        assert not any(layer.actcompress.plans.leaf_calls for layer in model.model.layers)
    assert kept["long"] <= kept["exact"]
