"""MLPs in tiles of rows: gradients are stock's, only the input is kept, working memory is that of one tile."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import CompressionConfig, estimate, patch_model, unpatch_model
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.memory.measurement.allocator import allocator_trace
from hf_actcompress.modules.base import settings_of
from hf_actcompress.modules.tiled import TiledMixin
from hf_actcompress.reference import tiles
from tests.families import FAMILIES
from tests.oracle import assert_equal_bits, assert_within_law, held_bytes

TILED = CompressionConfig(tiled_mlp=5)
# families whose layers have an MLP module of one input; in the others its parts belong to the layer
WITH_MLP = ("gpt2-gelu-new", "gpt2-gelu-tanh", "llama", "gemma", "phi3", "t5-gated", "vit", "modernbert", "gpt-neox")


def _families() -> list[Any]:
    return [family for family in FAMILIES if family.name in WITH_MLP]


def llama(layers: int = 2, hidden: int = 64, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return hf.LlamaModel(config).to(dtype).train()


def with_lora(model: nn.Module, **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    wrapped: nn.Module = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4, **options))
    for name, p in wrapped.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05)
    return wrapped


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def some_rows(hidden: int = 64, rows: int = 37, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, rows, hidden, generator=torch.Generator().manual_seed(3)).to(dtype)


def gradients(model: Any, x: Tensor, needs_x: bool = True) -> list[Tensor]:
    x = x.clone().requires_grad_(needs_x)
    y = model(inputs_embeds=x).last_hidden_state
    torch.manual_seed(5)
    y.backward(torch.randn(y.shape, dtype=torch.float64).to(y.dtype))
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [*([x.grad] if needs_x else []), *found]


@pytest.mark.parametrize("family", _families(), ids=lambda family: family.name)
def test_every_kind_of_mlp_is_stock_in_fp64(family: Any) -> None:
    batch = {k: v.double() if v.is_floating_point() else v for k, v in family.make_batch("none").items()}
    results = []
    for config in (None, TILED):
        model = family.build(torch.float64)
        if config is not None:
            patch_model(model, config)
            tiled = [m for m in model.modules() if isinstance(m, TiledMixin) and settings_of(m).tile == 5]
            assert tiled, "no MLP was found"
        loss = model(**batch).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    # transformers computes the loss in fp32
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("build", [llama, lambda **o: with_lora(llama(**o))], ids=["full", "lora"])
def test_gradients_in_bf16_err_as_stocks(build: Callable[..., nn.Module], checkpointing: bool | None) -> None:
    def run(config: CompressionConfig | None, dtype: torch.dtype) -> list[Tensor]:
        model = build(dtype=torch.bfloat16).to(dtype)
        if config is not None:
            patch_model(model, config)
        if checkpointing is not None:
            checkpointed(model, reentrant=checkpointing)
        return gradients(model, some_rows(dtype=torch.bfloat16, rows=200).to(dtype))

    ours, stock = run(CompressionConfig(tiled_mlp=64), torch.bfloat16), run(None, torch.bfloat16)
    assert_within_law(ours, stock, run(None, torch.float64))


def test_under_autocast_with_frozen_parts_and_without_a_gradient_of_the_input() -> None:
    def run(config: CompressionConfig | None) -> list[Tensor]:
        model = llama(layers=1)
        for name, p in model.named_parameters():
            p.requires_grad_("up_proj" in name or "down_proj" in name)
        if config is not None:
            patch_model(model, config)
        with torch.autocast("cpu", torch.bfloat16):
            x = some_rows()
            y = model(inputs_embeds=x).last_hidden_state
        y.backward(torch.ones_like(y))
        return [p.grad for p in model.parameters() if p.grad is not None]

    ours, stock = run(CompressionConfig(tiled_mlp=1000)), run(None)
    assert len(ours) == 2
    assert_equal_bits(ours, stock)


def test_odd_calls() -> None:
    """Expanded gradients, a second backward, no tokens, two dimensions, and hooks on the weights."""
    model = llama(layers=1)
    stock_mlp = llama(layers=1).layers[0].mlp  # type: ignore[union-attr, index]
    patch_model(model, TILED)
    mlp: Any = model.layers[0].mlp  # type: ignore[union-attr, index]
    for x in (some_rows(), some_rows()[0], some_rows()[:, ::2], some_rows()[:, :0]):
        results = []
        for module in (mlp, stock_mlp):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            calls: list[int] = []
            hook = module.up_proj.weight.register_hook(lambda g, calls=calls: calls.append(1))
            y = module(leaf)
            y.sum().backward(retain_graph=True)
            y.sum().backward()
            hook.remove()
            assert len(calls) == 2, "a hook on a weight sees each backward once"
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
            module.zero_grad()
        torch.testing.assert_close(results[0], results[1])
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize(("trained", "said"), [(True, "modified by an inplace operation"), (False, "written on")])
def test_weights_that_were_written_on_raise(trained: bool, said: str) -> None:
    model: Any = patch_model(llama(layers=1).requires_grad_(trained), TILED)
    y = model(inputs_embeds=some_rows().requires_grad_()).last_hidden_state
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight.add_(1)
    with pytest.raises(RuntimeError, match=said):
        y.sum().backward()


def test_exchanged_weights_get_the_gradients() -> None:
    """The weights of the forward, which the module has no longer when backward runs."""
    mlp: Any = patch_model(llama(layers=1), TILED).layers[0].mlp  # type: ignore[union-attr, index]
    found = []
    for module in (mlp, copy.deepcopy(unpatch_model(mlp))):
        others = {name: (2 * p.detach()).requires_grad_() for name, p in module.named_parameters()}
        before = list(module.parameters())
        y = torch.func.functional_call(module, others, (some_rows().requires_grad_(),))
        y.sum().backward()
        assert all(a is b and a.grad is None for a, b in zip(module.parameters(), before, strict=True))
        found.append([x.grad for x in others.values()])
    torch.testing.assert_close(*found)


def test_what_an_mlp_draws_is_drawn_again() -> None:
    """The MLP has LoRA's dropout. Finite differences in fp64 show that backward draws the masks of the forward."""
    model = with_lora(llama(layers=1), lora_dropout=0.5).double()
    mlp: Any = patch_model(model, TILED).base_model.model.layers[0].mlp  # type: ignore[union-attr]
    x, direction = some_rows(rows=11).double().requires_grad_(), some_rows(rows=11).double().flip(1)

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(9)
        return mlp(x).square().sum()

    value(x).backward()
    state = torch.get_rng_state()
    value(x.detach())
    assert torch.equal(torch.get_rng_state(), state), "the backward leaves the generator as it was"
    step = 1e-5
    expected = (value(x.detach() + step * direction) - value(x.detach() - step * direction)) / (2 * step)
    torch.testing.assert_close((x.grad * direction).sum(), expected, rtol=1e-6, atol=1e-8)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            # counts multiplications
            self.rows += args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("build", [llama, lambda: with_lora(llama())], ids=["full", "lora"])
def test_tiles_cost_no_product_more_than_stocks_checkpointing(build: Callable[[], nn.Module]) -> None:
    counts = []
    for config in (None, TILED):
        model = build()
        if config is not None:
            patch_model(model, config)
        checkpointed(model)
        with Products() as products:
            gradients(model, some_rows())
        counts.append(products.rows)
    assert counts[1] <= counts[0]


def test_an_mlp_keeps_its_input_alone() -> None:
    """With "long", a layer keeps its input, q, k, v, attention's output, the MLP's norm's input, and statistics."""
    hidden, x = 64, some_rows(rows=256, dtype=torch.bfloat16)

    def kept(config: CompressionConfig | str) -> float:
        sizes = []
        for layers in (1, 2):
            model = patch_model(llama(layers, hidden, torch.bfloat16), config)
            sizes.append(held_bytes(lambda model=model: model(inputs_embeds=x.requires_grad_()).last_hidden_state))
        return (sizes[1] - sizes[0]) / x.numel()

    assert kept("exact") - kept("long") == pytest.approx(14, abs=0.2)


@pytest.mark.daily(2)
@pytest.mark.parametrize("trained", [True, False])
def test_the_peak_of_a_checkpointed_layer(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are in bytes per token and channel, above what is kept. A tile is small compared with the layer.

    In fp32: in bf16 a CPU, which has no kernel for it, computes the norm's backward in fp32, and that is the peak then.
    """
    monkeypatch.setattr(tiles, "TILE", 2**14)
    hidden, rows, peaks = 128, 8192, []
    for config in (None, CompressionConfig(tiled_mlp=64)):
        model = llama(2, hidden, torch.float32).requires_grad_(trained)
        if config is not None:
            patch_model(model, config)
        checkpointed(model)
        x = some_rows(hidden, rows // 2, torch.float32).requires_grad_()
        y = model(inputs_embeds=x).last_hidden_state
        dy = torch.randn_like(y)
        peaks.append(allocator_trace(lambda y=y, dy=dy: y.backward(dy)).peak_bytes / x.numel())
    assert peaks[1] <= 32 < 90 <= peaks[0], peaks


def test_sums_of_weights_take_no_copy_of_a_gradient() -> None:
    """Beside the three sums in fp32, memory holds one gradient of a tile, and a few rows of its copy in fp32."""
    hidden, tile = 768, 64
    mlp: Any = patch_model(llama(1, hidden, torch.bfloat16), CompressionConfig(tiled_mlp=tile)).layers[0].mlp  # type: ignore[union-attr, index]
    x = some_rows(hidden, 2 * tile, torch.bfloat16).requires_grad_()
    y = mlp(x)
    dy, weight = torch.randn_like(y), mlp.up_proj.weight.numel()
    inside = 10 * 2 * tile * 7 * hidden // 2 + 2 * x.numel()
    assert allocator_trace(lambda: y.backward(dy)).peak_bytes <= (3 * 4 + 2) * weight + 4 * tiles.TILE + inside


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_estimate_sees_it(device: str) -> None:
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    exact, tiled = (
        estimate(config, batch_size=2, seq_len=512, config=c, dtype="bfloat16", device=device)
        for c in ("exact", CompressionConfig(tiled_mlp=64))
    )
    gate_and_up = 3 * 2 * 512 * 2 * 512 * 2
    assert exact.kept_bytes - tiled.kept_bytes == pytest.approx(gate_and_up, rel=0.02)
    if device == "cpu":
        torch.manual_seed(0)
        model = patch_model(hf.LlamaForCausalLM(config).to(torch.bfloat16).train(), CompressionConfig(tiled_mlp=64))
        ids = torch.randint(0, 64, (2, 512))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model(input_ids=ids, labels=ids).loss.backward()
        step = allocator_trace(lambda: model(input_ids=ids, labels=ids).loss.backward())
        assert tiled.step_peak_bytes == pytest.approx(step.peak_bytes, rel=0.05)


def test_hooks_inside_and_compiled_graphs_leave_an_mlp_whole() -> None:
    mlp: Any = patch_model(llama(layers=1), TILED).layers[0].mlp  # type: ignore[union-attr, index]
    seen: list[int] = []
    hook = mlp.up_proj.register_forward_hook(lambda module, args, y: seen.append(y.shape[1]))
    mlp(some_rows().requires_grad_()).sum().backward()
    hook.remove()
    assert seen == [37]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(some_rows().requires_grad_()), mlp(some_rows()))


@pytest.mark.parametrize("wrong", [-1, 2.5, "some", True])
def test_wrong_tiles_are_named(wrong: Any) -> None:
    with pytest.raises(UnknownOptionError, match="tiled_mlp.*a number of rows"):
        CompressionConfig(tiled_mlp=wrong)
