"""Options of checkpointing change no gradient: what a layer keeps, which layers are checkpointed, stock's own forms."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils

from hf_actcompress import CompressionConfig, estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import UnknownOptionError
from tests.families import BODY, BY_NAME, build, differing, oracle_step, relative_error, step
from tests.oracle import EXACT
from tests.slopes import bert, gpt2, llama, slope

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
KEPT = replace(BODY, checkpoint_attention="kept")
LAYERS = 2


class Kernels(TorchDispatchMode):
    """Counts how often fused attention runs, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "flash_attention" in name:
            self.backward += "backward" in name
            self.forward += "backward" not in name
        return func(*args, **(kwargs or {}))


def checkpointed(name: str, mode: str = "fp32", reentrant: bool = False, **options: Any) -> Any:
    model = build(BY_NAME[name], mode, **options)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2-gelu-tanh", "mistral", "t5"])
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_attention_does_not_run_again(name: str, padding: str, reentrant: bool) -> None:
    batch, model = BY_NAME[name].make_batch(padding), checkpointed(name, reentrant=reentrant)
    oracle, expected = oracle_step(build(BY_NAME[name], "fp32"), batch), step(model, batch)
    patch_model(model, BODY)
    with Kernels() as stock:
        step(model, batch)
    patch_model(model, KEPT)
    with Kernels() as kept:
        found = step(model, batch)
    assert torch.equal(found[0], expected[0])
    assert relative_error(found[1], oracle) <= EXACT * relative_error(expected[1], oracle)
    if name != "t5":  # T5's bias needs a gradient, which no fused kernel computes
        assert (stock.forward, stock.backward) == (2 * LAYERS, LAYERS)
        assert (kept.forward, kept.backward) == (LAYERS, LAYERS)


@pytest.mark.parametrize("config", [KEPT, replace(KEPT, tiled_mlp=5)])
@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_with_tiles_and_dropout_in_other_modes(config: CompressionConfig, name: str, mode: str) -> None:
    """The random numbers stay the same. Attention with dropout is recomputed."""
    for dropout in (0.0, 0.1):
        model, batch = checkpointed(name, mode, dropout=dropout), BY_NAME[name].make_batch("right")
        expected = step(patch_model(model, replace(BODY, tiled_mlp=config.tiled_mlp)), batch, mode)
        state = torch.get_rng_state()
        found = step(patch_model(model, config), batch, mode)
        assert torch.equal(found[0], expected[0]) and torch.equal(torch.get_rng_state(), state)
        assert not differing(found[1], expected[1])


def test_with_lora_and_packed_rows() -> None:
    peft = pytest.importorskip("peft")
    model = checkpointed("llama")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    model.enable_input_require_grads()
    batch = BY_NAME["llama"].make_batch()
    rows, length = batch["input_ids"].shape
    batch["position_ids"] = torch.arange(length).remainder(5).expand(rows, length)
    expected = step(patch_model(model, BODY), batch)
    with Kernels() as kernels:
        found = step(patch_model(model, KEPT), batch)
    assert not differing(found[1], expected[1])
    assert kernels.forward == kernels.backward > 0


def test_a_second_backward_and_one_that_has_been_written_on() -> None:
    model, batch = patch_model(checkpointed("llama"), KEPT), BY_NAME["llama"].make_batch()
    expected = step(model, batch)[1]
    loss = model(**batch).loss
    for _ in range(2):
        loss.backward(retain_graph=True)
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        assert not differing(grads, expected)
        model.zero_grad()
    # this hook changes attention's output in place; backward must use the values that the layer has used
    writes = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0].mul_(0.5),))
    written = step(model, batch)[1]
    # the write changes the layout of a gradient, and with it, on some CPUs, how a product rounds
    for name, expected_grad in step(patch_model(model, BODY), batch)[1].items():
        torch.testing.assert_close(written[name], expected_grad, rtol=0, atol=1e-6 * float(expected_grad.abs().max()))
    writes.remove()


@pytest.mark.parametrize("model", [bert, gpt2, llama])
def test_bytes_per_layer(model: Any) -> None:
    """In bf16 attention's output takes two bytes per element, and its statistics four per head, which is 64 wide."""

    def prepare(config: CompressionConfig) -> Callable[[Any], Any]:
        def patch(model: Any) -> Any:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            return patch_model(model, config)

        return patch

    configs = CompressionConfig(), KEPT
    plain, kept = (slope(model, prepare=prepare(config), length=128).kept for config in configs)
    assert kept - plain == pytest.approx(2 + 4 / 64, abs=0.01)


SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 1, "use_cache": False,
}  # fmt: skip


def small(config: CompressionConfig) -> tuple[Any, list[bool]]:
    torch.manual_seed(0)
    model = patch_model(hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL)).train(), config)
    return model, [layer.gradient_checkpointing for layer in model.model.layers]


def test_shorthands_and_their_memory() -> None:
    """Checkpointing the last layer, too, does not lower the peak. An estimate applies shorthands to the whole model."""
    ids = torch.randint(0, 64, (2, 256), generator=torch.Generator().manual_seed(0))
    peaks, expected = {}, None
    for name, flags in {"every:1": [1] * 6, "every:2": [1, 0] * 3, "but_last:1": [1] * 5 + [0]}.items():
        config = CompressionConfig(checkpoint=name, checkpoint_attention="kept", logits=False)
        model, found = small(config)
        assert found == [bool(flag) for flag in flags]
        model(input_ids=ids, labels=ids).loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        expected = expected or grads
        # sums are taken in another order
        assert relative_error(grads, expected) < 1e-5

        def forward(model: Any = model) -> Tensor:
            return model(input_ids=ids, labels=ids).loss

        kept = kept_bytes(forward, "cpu")
        peaks[name] = measure_step(lambda forward=forward: forward().backward(), "cpu").peak_bytes
        said = estimate(model.config, batch_size=2, seq_len=256, config=config, dtype="float32", device="cpu")
        assert said.kept_bytes == pytest.approx(kept, rel=0.01)
        assert said.step_peak_bytes == pytest.approx(peaks[name], rel=0.05)
    assert peaks["but_last:1"] <= 1.01 * peaks["every:1"] < peaks["every:2"]


def test_an_estimate_for_cuda_keeps_it_too() -> None:
    kept = [
        estimate(hf.LlamaConfig(**SMALL), batch_size=2, seq_len=256, dtype="bfloat16", config=CompressionConfig(
            checkpoint="every:1", checkpoint_attention=attention)).kept_bytes
        for attention in ("recomputed", "kept")
    ]  # fmt: skip
    per_token = 6 * (64 * 2 + 4 * 4)
    # a device's kernel also returns the seed and the offset of its dropout, in a block of 512 bytes each
    assert kept[1] - kept[0] == pytest.approx(512 * per_token + 6 * 2 * 512, rel=0.001)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint": "every:0"}, {"checkpoint": "layers.1"}, {"checkpoint_attention": "yes"},
        {"checkpoint_attention": "kept", "checkpoint_input": "int8"},
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UnknownOptionError):
        CompressionConfig(**options)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("options", [{"every_n_layers": 2}, {"offload": True}], ids=["every_n_layers", "offload"])
@pytest.mark.parametrize("config", [BODY, KEPT, replace(KEPT, tiled_mlp=5)], ids=["exact", "kept", "tiled"])
def test_stocks_own_forms(name: str, options: Any, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build(BY_NAME[name], "fp32")
    known = inspect.signature(getattr(stock, "activation_checkpointing_enable", lambda: None)).parameters
    if not set(options) <= set(known):
        pytest.skip("this transformers has no such option")
    # page-locked memory needs an accelerator
    monkeypatch.setattr(modeling_utils, "save_on_cpu", lambda **_: save_on_cpu())
    stock.activation_checkpointing_enable(**options)
    ours, batch = patch_model(copy.deepcopy(stock), config), BY_NAME[name].make_batch("right")
    oracle = oracle_step(build(BY_NAME[name], "fp32"), batch)
    expected, found = step(stock, batch), step(ours, batch)
    assert torch.equal(found[0], expected[0])
    assert relative_error(found[1], oracle) <= EXACT * relative_error(expected[1], oracle)


@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("config", [BODY, KEPT, replace(BODY, tiled_mlp=5)], ids=["exact", "kept", "tiled"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_trls_selective_checkpointing(name: str, config: CompressionConfig, padding: str) -> None:
    """With TRL's ``gradient_checkpointing_kwargs={"selective": True}`` attention does not run again."""
    selective = pytest.importorskip("trl.models").enable_selective_activation_checkpointing
    batch, results = BY_NAME[name].make_batch(padding), []
    oracle = oracle_step(build(BY_NAME[name], "fp32"), batch)
    for patch in (False, True):
        model = build(BY_NAME[name], "fp32")
        if patch:
            patch_model(model, config)
        selective(model)
        model.gradient_checkpointing_enable()
        with Kernels() as kernels:
            results.append(step(model, batch))
        assert kernels.forward == LAYERS
    (expected, grads), (found, ours) = results
    assert torch.equal(found, expected)
    assert relative_error(ours, oracle) <= EXACT * relative_error(grads, oracle)


@pytest.mark.parametrize("plans", [False, True])
@pytest.mark.parametrize("name", ["gpt2-gelu-new", "llama"])
def test_one_layer_beside_the_cache_that_a_plain_forward_makes(name: str, plans: bool) -> None:
    """GPT-2 passes the cache to its layers as a positional argument, which transformers does not remove."""
    config, batch = replace(BODY, plans=plans), BY_NAME[name].make_batch()
    steps = []
    for checkpoints in ((), ("h.1" if name.startswith("gpt2") else "layers.1",)):
        model = build(BY_NAME[name], "fp32")
        model.config.use_cache = True
        steps.append(step(patch_model(model, replace(config, checkpoint=checkpoints)), batch))
    assert torch.equal(steps[0][0], steps[1][0]) and not differing(steps[0][1], steps[1][1])
