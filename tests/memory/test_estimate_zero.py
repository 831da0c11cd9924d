"""Estimates for one process of several under ZeRO, compared with its paper and with DeepSpeed's documented defaults.

DeepSpeed is not installed and needs a GPU: nothing here is measured.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, estimate
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.estimation.fake_step.setting import Setting
from hf_actcompress.memory.estimation.states.optimizers import optimizer_rule
from hf_actcompress.memory.estimation.states.zero import Zero
from tests.slopes import llama

LLAMA = partial(llama, 3, hidden=256, pad_token_id=0)
SIZES: dict[str, Any] = {"batch_size": 2, "seq_len": 64, "device": "cpu"}
SETTING = Setting(1, 1, None, True)
BUCKET, LIVE = 5 * 10**8, 10**9


def of_one_tensor(elements: int) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(elements, dtype=torch.bfloat16, device="meta"))
    return model


@pytest.mark.parametrize(("stage", "processes", "published"), [(2, 64, 16.6), (2, 1024, 15.1), (3, 64, 1.9)])
def test_states_of_the_paper(stage: int, processes: int, published: float) -> None:
    """arXiv 1910.02054, table 1: gigabytes of a model of 7.5 billion parameters with Adam in mixed precision."""
    found = Zero(stage, processes).states(of_one_tensor(7_500_000_000), SETTING, optimizer_rule("adamw"))
    assert sum(found[:3]) / 1e9 == pytest.approx(published, abs=0.06)
    # the only tensor is larger than the limit for live parameters, and is gathered all the same
    assert found.workspace == 2 * (BUCKET + (7_500_000_000 if stage == 3 else 0))


def test_what_is_gathered_at_most() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(of_one_tensor(4 * 10**8) for _ in range(5))
    found = Zero(3, 8).states(model, SETTING, optimizer_rule("adamw"))
    assert found.workspace == 2 * (BUCKET + LIVE) == found.in_evaluation
    model.layers = model.layers[:2]
    assert Zero(3, 8).states(model, SETTING, optimizer_rule("sgd")).workspace == 2 * (BUCKET + 8 * 10**8)


@pytest.mark.parametrize("stage", [2, 3])
def test_parts(stage: int) -> None:
    model, processes = LLAMA().bfloat16(), 3
    alone = estimate(model, **SIZES)
    found = estimate(model, zero=stage, processes=processes, **SIZES)
    sizes = [p.numel() for p in model.parameters()]
    part = -(-sum(sizes) // processes)
    divided = [n for n in sizes if n > 10**5] if stage == 3 else []
    rest = alone.weights_bytes - 2 * sum(divided)
    # buffers are in bf16, too
    rest -= sum(b.nbytes - 2 * b.numel() for b in model.buffers())
    assert found.weights_bytes == rest + sum(2 * -(-n // processes) for n in divided)
    assert found.gradients_bytes == 2 * part
    assert found.optimizer_bytes == 4 * part + 2 * 4 * part + 4
    workspace = 2 * BUCKET + 2 * sum(divided)
    assert found.step_peak_bytes == alone.step_peak_bytes + workspace
    assert found.kept_bytes == alone.kept_bytes
    assert found.optimizer_step_bytes == 4 * part + 2 * (part if stage == 2 else BUCKET)
    assert "not measured" in str(found)


def test_no_mlp_is_computed_in_tiles_where_its_weights_are_divided() -> None:
    """As in the patched model: a tile would need weights that are there only while their layer runs."""
    model, sizes = LLAMA().bfloat16(), {"batch_size": 4, "seq_len": 512}
    whole, tiled = (CompressionConfig(tiled_mlp=rows) for rows in (0, 64))
    for stage, same in ((2, False), (3, True)):
        found = [estimate(model, zero=stage, processes=2, config=config, **sizes) for config in (whole, tiled)]
        assert (found[0].kept_bytes == found[1].kept_bytes) == same
        assert ("no MLP is computed in tiles" in str(found[1])) == same
    assert "no MLP is computed in tiles" not in str(found[0])


def test_mixed_precision_is_weights_of_16_bits() -> None:
    options = {"zero": 2, "processes": 2, **SIZES}
    found = estimate(LLAMA(), autocast="bf16", **options)
    half = estimate(LLAMA().bfloat16(), **options)
    assert (found.weights_bytes, found.kept_bytes, found.total_peak_bytes) == (
        half.weights_bytes, half.kept_bytes, half.total_peak_bytes,
    )  # fmt: skip


def test_adapters_are_all_that_is_divided_in_stage_2() -> None:
    model = LLAMA().bfloat16()
    alone, found = (estimate(model, lora=4, **options) for options in (SIZES, {"zero": 2, "processes": 2, **SIZES}))
    # PEFT has adapters in fp32 and DeepSpeed in bf16, divided between two processes
    assert found.gradients_bytes == pytest.approx(alone.gradients_bytes / 4, abs=2)
    assert alone.weights_bytes - alone.gradients_bytes < found.weights_bytes < alone.weights_bytes


def test_what_cannot_be_is_said() -> None:
    for wrong in ({"zero": 1, "processes": 2}, {"zero": 3}, {"zero": 2, "processes": 2, "fsdp": 2}):
        with pytest.raises(ModelConfigError, match="with or without zero" if "fsdp" in wrong else "zero is a stage"):
            estimate(LLAMA(), **SIZES, **wrong)
    with pytest.raises(ModelConfigError, match="quantised"):
        estimate(LLAMA().config, **SIZES, zero=3, processes=2, quantization="nf4", lora=4)
