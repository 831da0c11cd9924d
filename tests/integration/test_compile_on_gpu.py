"""torch.compile on a CUDA device: kept bytes, gradients, CUDA graphs, activations that wait in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actcompress import kept_bytes, patch_model
from tests.families import BY_NAME, Batch, Family, Gradients, relative_error, step
from tests.integration.compiling import build, three
from tests.slopes import VOCAB, bert, gpt2, llama

pytestmark = [pytest.mark.gpu, pytest.mark.daily(6)]

BATCH, LENGTH, HIDDEN = 2, 256, 256
BUILDERS = {"llama": llama, "gpt2": gpt2, "bert": bert}
BARS = [("llama", "exact", 23.5), ("gpt2", "exact", 20.5), ("bert", "exact", 20.5)]
BARS += [(name, "int8", 12.6) for name in BUILDERS]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _on_gpu(model: Any, batch: Batch) -> tuple[Any, Batch]:
    return model.cuda(), {name: x.cuda() for name, x in batch.items()}


def _kept(name: str, preset: str, layers: int) -> int:
    torch._dynamo.reset()
    model = BUILDERS[name](layers, HIDDEN).to("cuda", torch.bfloat16).train()
    model.loss_type = "ForCausalLM" if name == "gpt2" else None
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), device="cuda")
    compiled = torch.compile(patch_model(model, preset), fullgraph=True)
    compiled(input_ids=ids, labels=ids)
    return kept_bytes(lambda: compiled(input_ids=ids, labels=ids), "cuda")


def _kept_h(name: str, preset: str) -> float:
    """Per token and layer, in units of h: of three layers and two."""
    few, more = (_kept(name, preset, layers) for layers in (2, 3))
    return (more - few) / (BATCH * LENGTH * HIDDEN)


@pytest.mark.parametrize(("name", "preset", "bar"), BARS)
def test_kept_per_token_and_layer(name: str, preset: str, bar: float) -> None:
    assert _kept_h(name, preset) <= bar


def test_offloaded_tensors_leave_the_device() -> None:
    """Of a layer of Llama nothing stays there that has its size."""
    assert _kept_h("llama", "offload") < 2


@three
@pytest.mark.parametrize("vocabulary", [40_000, 40_003])
def test_gradients(family: Family, vocabulary: int) -> None:
    """The logits are large enough to be taken in pieces. The gradients are as close to fp64 as compiled stock's."""
    truth = _gradients(build(family, torch.float64, vocab_size=vocabulary), family)
    errors = []
    for preset in (None, "exact"):
        model = build(family, torch.float32, vocab_size=vocabulary)
        compiled = torch.compile(model if preset is None else patch_model(model, preset), fullgraph=True)
        torch._dynamo.reset()
        errors.append(relative_error(_gradients(compiled, family), truth))
    assert errors[1] <= 1.1 * errors[0] + 1e-7


def _gradients(model: Any, family: Family) -> Gradients:
    _, grads = step(*_on_gpu(model, family.make_batch("right")))
    return {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}


@pytest.mark.parametrize(
    ("preset", "mode"), [("exact", "reduce-overhead"), ("int8", "reduce-overhead"), ("offload", "default")]
)
def test_gradients_of_later_steps(preset: str, mode: str) -> None:
    """CUDA graphs, which run from the third step on, and activations that wait in host memory."""
    family = BY_NAME["llama"]
    model, batch = _on_gpu(family.build(torch.bfloat16), family.make_batch("right"))
    loss, expected = step(model, batch)
    compiled = torch.compile(patch_model(model, preset), mode=mode, fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        compiled_loss = compiled(**batch).loss
        compiled_loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-2)
    assert relative_error(found, {name: g.double() for name, g in expected.items()}) < 0.05
