"""Estimates and reports of compiled models, beside what Inductor's code keeps and holds at its peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from hf_actcompress import estimate, kept_bytes, measure_step, memory_report, patch_model
from hf_actcompress.compilation.buffers import Buffers
from hf_actcompress.errors import ModelConfigError, UnknownOptionError
from tests.slopes import gpt2, llama

pytestmark = pytest.mark.daily(8)

LAYERS, BATCH, LENGTH = 2, 4, 256
SIZES = {"batch_size": BATCH, "seq_len": LENGTH}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def _llama(**options: Any) -> Any:
    return llama(LAYERS, hidden=128, vocab_size=8000, pad_token_id=0, **options).bfloat16().train()


def _batch(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, model.config.vocab_size, (BATCH, LENGTH))
    return {"input_ids": ids, "labels": ids}


def _inductor(model: Any) -> tuple[int, int]:
    """(kept, peak) of a step, on the allocator."""
    compiled, batch = torch.compile(model), _batch(model)

    def step() -> None:
        compiled(**batch).loss.backward()

    step()
    return kept_bytes(lambda: compiled(**batch), "cpu"), measure_step(step, "cpu").peak_bytes


def test_a_concatenation_that_products_write_takes_memory() -> None:
    """As the gradient of a tied head does, which is made in pieces and added to the embedding's."""
    x = torch.ones(4, 4)
    graph = make_fx(lambda a, b: torch.cat([a @ b, b @ a]) + 1)(x, x).graph
    (cat,) = (node for node in graph.nodes if node.target is torch.ops.aten.cat.default)
    plan = Buffers(graph)
    assert cat not in plan.no_memory
    assert plan.no_memory.issuperset(cat.all_input_nodes)
    assert [*plan.whole.items()] == [(cat.all_input_nodes[0], cat)]


@pytest.mark.parametrize("case", ["llama stock", "llama int8", "gpt2 exact, dropout"])
def test_an_estimate_is_what_inductor_keeps(case: str) -> None:
    """What is kept within 1%, the peak within 5%, at a vocabulary whose logits are the largest tensors."""
    family, _, config = case.partition(",")[0].partition(" ")
    if family == "llama":
        model = _llama()
    else:
        model = gpt2(LAYERS, hidden=128, vocab_size=8000, bos_token_id=0, eos_token_id=0, resid_pdrop=0.1)
        model = model.bfloat16().train()
    found = estimate(model, **SIZES, config=config, device="cpu", engine="compile")
    if config != "stock":
        patch_model(model, config)
    if family == "gpt2":
        # as the estimate has it: transformers' warning of a loss without a name breaks the graph
        model.loss_type = "ForCausalLM"
    kept, peak = _inductor(model)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    # older ones write the gradient of the logits in fp32
    if torch.__version__ >= "2.13":
        assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
    assert sum(found.kept_by_role.values()) == found.kept_bytes


@pytest.mark.parametrize(("device", "checkpointing"), [("cpu", False), ("cuda", False), ("cpu", True)])
def test_more_layers_by_extrapolation(device: str, checkpointing: bool) -> None:
    """Seven layers out of graphs of two to four; checkpointed, and by the rules of a CUDA device."""
    models = [llama(layers, hidden=64, vocab_size=500, pad_token_id=0).bfloat16() for layers in (2, 7)]
    options: Any = {**SIZES, "device": device, "gradient_checkpointing": checkpointing, "engine": "compile"}
    few, found = (estimate(model, **options) for model in models)
    assert found.kept_bytes - few.kept_bytes == 5 * found.kept_per_layer > 0


class _Breaks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return nn.functional.silu(x)


def test_no_estimate_of_a_broken_graph() -> None:
    model = _llama()
    model.model.layers[0].mlp.act_fn = _Breaks()
    with pytest.raises(ModelConfigError, match="cannot be traced as one graph"):
        estimate(model, **SIZES, engine="compile")


def test_the_engine_of_an_estimate() -> None:
    """As the model is, unless it is said; what is offloaded is not estimated under a compiler."""
    model = _llama()
    assert estimate(torch.compile(model), **SIZES, device="cpu").engine == "compile"
    assert estimate(model, **SIZES, device="cpu").engine == "eager"
    with pytest.raises(ModelConfigError, match="offloading"):
        estimate(model, **SIZES, config="offload", engine="compile")
    with pytest.raises(UnknownOptionError, match="'eager', 'compile'"):
        estimate(model, **SIZES, engine="jit")


def test_estimates_do_not_use_up_the_graphs_of_a_model() -> None:
    """torch compiles the same code eight times at most, in a process."""
    model = _llama()
    for batch_size in range(1, 11):
        estimate(model, batch_size=batch_size, seq_len=16, device="cpu", engine="compile")
    compiled = torch.compile(model, backend="hf_actcompress")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    memory_report(compiled, _batch(model))
    reported = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled(**_batch(model))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == reported + 1 > before + 1


def test_an_estimate_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    estimate(_untouched(before), **SIZES, engine="compile", device="cpu")
    assert torch.equal(torch.get_rng_state(), before)


def _untouched(state: torch.Tensor) -> Any:
    config = gpt2(LAYERS, hidden=64, vocab_size=500, bos_token_id=0, eos_token_id=0, resid_pdrop=0.1).config
    torch.set_rng_state(state)
    return config


@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "layers"])
def test_a_report_of_a_compiled_model(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its sum is what the compiled model keeps, the modules are named, and the model is left as it was."""
    model = _llama()
    compiled: Any = model
    if how == "torch.compile":
        compiled = torch.compile(model)
    elif how == "model.compile":
        model.compile()
    else:
        for layer in model.model.layers:
            layer.compile()
    calls = {module: module.__dict__.get("_compiled_call_impl") for module in model.modules()}
    report = memory_report(compiled, _batch(model), "int8")
    assert {module: module.__dict__.get("_compiled_call_impl") for module in model.modules()} == calls
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"
    assert not [record for record in caplog.records if record.name.startswith("hf_actcompress.compilation")]
    assert report.hidden_size == 128 and report.layer_tokens == LAYERS * BATCH * LENGTH
    # gate and up, a byte each, whichever of the modules there reads them
    mlps = {i: sum(r.patched_bytes for r in report.rows if f"layers.{i}.mlp" in r.module) for i in range(LAYERS)}
    assert all(size > BATCH * LENGTH * 2 * 448 for size in mlps.values())
    patch_model(compiled, "int8")
    backend = "hf_actcompress"
    if how == "layers":
        for layer in model.model.layers:
            layer.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    batch = _batch(model)
    compiled(**batch)
    assert report.patched_bytes == pytest.approx(kept_bytes(lambda: compiled(**batch), "cpu"), rel=0.05)
