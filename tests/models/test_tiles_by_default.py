"""Checkpointed layers with many rows compute their MLPs in tiles without being asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, estimate, patch_model
from hf_actcompress.layers.site import PlannedLayerMixin
from hf_actcompress.memory.measurement.allocator import allocator_trace
from hf_actcompress.modules import tiled as tiled_mlps
from hf_actcompress.ops import _tiled
from hf_actcompress.reference import tiles
from tests.models.test_tiled_mlps import Products, checkpointed, gradients, llama, some_rows, with_lora
from tests.oracle import assert_within_law


def _tiles_that_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of a tile of each MLP that is computed in tiles from now on."""
    seen: list[int] = []
    forward = _tiled.forward_in_tiles

    def counted(stock: Any, x: Tensor, tile: int) -> Tensor:
        seen.append(tile)
        return forward(stock, x, tile)

    monkeypatch.setattr(_tiled, "forward_in_tiles", counted)
    return seen


@pytest.mark.parametrize("build", [llama, lambda **o: with_lora(llama(**o))], ids=["full", "lora"])
def test_checkpointed_layers_with_many_rows_go_in_tiles_without_being_asked(
    build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their gradients err as stock's, no product is computed more often, and fewer rows run as they did."""
    monkeypatch.setattr(tiled_mlps, "LEAST_ROWS", 64)
    seen = _tiles_that_run(monkeypatch)
    config = CompressionConfig()

    def run(config: CompressionConfig | None, dtype: torch.dtype, rows: int) -> list[Tensor]:
        model = build(dtype=torch.bfloat16).to(dtype)
        if config is not None:
            patch_model(model, config)
        return gradients(checkpointed(model), some_rows(dtype=torch.bfloat16, rows=rows).to(dtype))

    with Products() as products:
        ours = run(config, torch.bfloat16, 100)
    assert seen == [67, 67], "three tiles of 200 rows in each of the two layers"
    with Products() as of_stock:
        stock = run(None, torch.bfloat16, 100)
    assert products.rows <= of_stock.rows
    assert_within_law(ours, stock, run(None, torch.float64, 100))
    run(config, torch.bfloat16, 63)
    assert len(seen) == 2, "126 rows are too few for two tiles"


def test_layers_that_are_not_checkpointed_compute_many_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_mlps, "LEAST_ROWS", 8)
    seen = _tiles_that_run(monkeypatch)
    gradients(patch_model(llama()), some_rows())
    gradients(checkpointed(patch_model(llama(), CompressionConfig(tiled_mlp=0))), some_rows())
    assert not seen
    gradients(checkpointed(patch_model(llama())), some_rows())
    assert seen == [9, 9]


@pytest.mark.daily(2)
def test_the_default_peak_of_a_checkpointed_layer_at_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tiles instead of 16,384 rows: measured, and as the estimate says."""
    monkeypatch.setattr(tiles, "TILE", 2**14)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids, peaks, said = torch.randint(0, 64, (32, 512)), [], []
    for rows in (0, "checkpointed"):
        asked = CompressionConfig(tiled_mlp=rows)
        torch.manual_seed(0)
        model = checkpointed(patch_model(hf.LlamaForCausalLM(config).to(torch.bfloat16).train(), asked))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model(input_ids=ids, labels=ids).loss.backward()
        step = allocator_trace(lambda model=model: model(input_ids=ids, labels=ids).loss.backward())
        peaks.append(step.peak_bytes)
        options: dict[str, Any] = {"gradient_checkpointing": True, "dtype": "bfloat16", "device": "cpu"}
        said.append(estimate(config, batch_size=32, seq_len=512, config=asked, **options).step_peak_bytes)
    assert peaks[1] < 0.93 * peaks[0], peaks
    assert said == pytest.approx(peaks, rel=0.05)


def test_a_plain_mlp_is_in_tiles_in_a_checkpointed_layers_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_mlps, "LEAST_ROWS", 16)
    seen = _tiles_that_run(monkeypatch)
    model: Any = patch_model(_gpt2(resid_pdrop=0.0))
    ids = torch.randint(0, 64, (2, 20))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(isinstance(layer, PlannedLayerMixin) for layer in model.transformer.h)
    assert not seen and [layer.actcompress.plans.calls for layer in model.transformer.h] == [1, 1]
    checkpointed(model)(input_ids=ids, labels=ids).loss.backward()
    assert seen == [20, 20] and [layer.actcompress.plans.calls for layer in model.transformer.h] == [2, 2]


def test_an_mlp_with_dropout_stays_whole_and_draws_stocks_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layer's plan is that of few rows."""
    monkeypatch.setattr(tiled_mlps, "LEAST_ROWS", 16)
    seen = _tiles_that_run(monkeypatch)
    ids, losses = torch.randint(0, 64, (2, 20)), []
    model: Any
    for model in (_gpt2(resid_pdrop=0.5), patch_model(_gpt2(resid_pdrop=0.5))):
        torch.manual_seed(4)
        losses.append(checkpointed(model)(input_ids=ids, labels=ids).loss)
        losses[-1].backward()
    assert torch.equal(*losses) and not seen
    assert [layer.actcompress.plans.calls for layer in model.transformer.h] == [1, 1]


def _gpt2(resid_pdrop: float) -> Any:
    torch.manual_seed(0)
    config = hf.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0, resid_pdrop=resid_pdrop
    )
    return hf.GPT2LMHeadModel(config).train()


def test_under_autocast_no_cast_of_a_weight_outlives_its_layer() -> None:
    """Autocast's cache would hold one of each MLP until the whole forward ends."""
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    ids, peaks = torch.randint(0, 64, (2, 16)), []
    for asked in (CompressionConfig(tiled_mlp=0), CompressionConfig(tiled_mlp=8)):
        model = checkpointed(patch_model(hf.LlamaForCausalLM(config).train(), asked))

        def forward(model: Any = model) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss: Tensor = model(input_ids=ids, labels=ids).loss
            return loss

        forward()
        peaks.append(allocator_trace(forward).peak_bytes)
    of_one_mlp = 3 * 256 * 2048 * 2
    assert peaks[1] < peaks[0] + of_one_mlp, peaks
