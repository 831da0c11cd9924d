"""Estimates of models up to 16 times as large as what was run, compared with the allocator's events of the real step.

Only the depth is extrapolated: from two to four layers, or from two to four periods if layers of different kinds
alternate. Batches and sequences are run at their full size.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from hf_actcompress import CompressionConfig, kept_bytes, measure_step, patch_model
from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.memory.estimation.extrapolation import whole_step
from hf_actcompress.memory.estimation.fake_step.step import FakeStep
from hf_actcompress.memory.estimation.layers import find_runs
from tests.memory.test_estimate import BF16, BUILDS, check, lora

pytestmark = pytest.mark.daily(4)

FEW, TIMES, WITHIN = 2, 16, 0.03
SMALL = {"batch": 1, "length": 32, "hidden": 64, "tolerance": WITHIN}


@pytest.mark.parametrize(
    ("family", "config", "checkpointing"),
    [
        ("bert", "exact", False),
        ("bert", "stock", True),
        ("gpt2", "stock", False),
        # the peak of four layers is in the backward of the embedding, that of 32 is not
        ("gpt2", "int8", True),
        ("llama", "exact", False),
        ("llama", "exact", True),
    ],
)
def test_depth(family, config, checkpointing):
    check(family, config, layers=TIMES * FEW, checkpointing=checkpointing, **SMALL)


@pytest.mark.parametrize(
    ("family", "config", "checkpointing"),
    [("gpt2", "exact", False), ("llama", "stock", False), ("llama", "exact", True)],
)
def test_depth_with_lora(family, config, checkpointing):
    # the first layer differs: nothing before it needs a gradient
    options = {**SMALL, "adapters": lora(0.05), "dtype": BF16}
    check(family, config, layers=TIMES * FEW, checkpointing=checkpointing, **options)


@pytest.mark.parametrize(
    ("family", "batch", "length", "checkpointing"),
    [("bert", TIMES, 32, False), ("gpt2", 1, TIMES * 32, True), ("llama", 1, TIMES * 32, False)],
)
def test_batch_and_sequence(family, batch, length, checkpointing):
    sizes = {**SMALL, "batch": batch, "length": length}
    check(family, "exact", layers=FEW + 3, checkpointing=checkpointing, **sizes)


def compare(model: Any, config: str, length: int) -> None:
    ids = torch.randint(3, 67, (1, length))
    found = estimate(model, batch_size=1, seq_len=length, config=config, device="cpu")
    if config != "stock":
        patch_model(model, config)
    kept = kept_bytes(lambda: model(input_ids=ids, labels=ids), "cpu")
    model(input_ids=ids, labels=ids).loss.backward()
    peak = measure_step(lambda: model(input_ids=ids, labels=ids).loss.backward(), "cpu").peak_bytes
    assert found.kept_per_layer > 0
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=WITHIN)


def test_layers_of_two_kinds_in_turn():
    options = {
        "vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "sliding_window": 16, "use_cache": False, "num_hidden_layers": TIMES * FEW,
    }  # fmt: skip
    compare(hf.Gemma2ForCausalLM(hf.Gemma2Config(**options)).train(), "exact", 32)


def test_an_encoder_and_a_decoder():
    options = {
        "vocab_size": 67, "d_model": 64, "d_ff": 128, "num_heads": 2, "d_kv": 32, "num_layers": TIMES,
        "num_decoder_layers": TIMES, "decoder_start_token_id": 0, "use_cache": False,
    }  # fmt: skip
    compare(hf.T5ForConditionalGeneration(hf.T5Config(**options)).train(), "exact", 32)


@pytest.mark.parametrize(("family", "checkpointing", "device"), [("bert", False, "cuda"), ("llama", True, "cpu")])
def test_what_estimates_share_changes_no_byte(family, checkpointing, device):
    """After its first estimate, an `Estimates` runs only two depths, and it remembers what kernels return.

    It also uses copies of the model that ran another batch. One of the codecs learns in training.
    """
    model, length = BUILDS[family](TIMES * FEW, hidden=64), 32
    several = Estimates(model, device=device)
    for config in ("stock", "int4", CompressionConfig(mlp="int4_measured")):
        for batch in (3, 5):
            options = {"batch_size": batch, "seq_len": length, "gradient_checkpointing": checkpointing}
            alone = estimate(model, config=config, device=device, **options)
            if batch == 5:
                # first without roles, from copies that were made with roles
                assert several.device_bytes(batch, length, config, checkpointing) == alone.device_bytes
            assert several.replayed(batch, length, config, checkpointing) == alone
            assert several.device_bytes(batch, length, config, checkpointing) == alone.device_bytes


class Depths:
    """A substitute for a model's steps, which computes bytes from the depth and records the depths that are asked for.

    Args:
        kept: A function of the number of layers: the bytes that these keep.
        before, at_loss, after: Bytes that are alive before the layers, at the loss beside what is kept, and at the end.
        hidden: A peak of so many bytes per layer, which is not in the timelines.
    """

    def __init__(self, kept: Any, before: int, at_loss: int, after: int, hidden: int = 0) -> None:
        self.kept, self.before, self.at_loss, self.after, self.hidden = kept, before, at_loss, after, hidden
        self.asked: list[int] = []

    def step(self, n: int) -> FakeStep:
        layers = [self.kept(i) for i in range(n + 1)]
        forward = [self.before, *layers]
        backward = [layers[-1] + self.at_loss, *layers[::-1], self.after]
        # a peak that the timelines do not show
        peak = max(*forward, *backward, self.hidden * n)
        return FakeStep(self.kept(n), peak, {"norm": self.kept(n)}, forward, backward)

    def __call__(self, model: nn.Module, roles: bool) -> FakeStep:
        self.asked.append(len(model.layers))
        return self.step(len(model.layers))


def of_layers(count: int) -> Any:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))
    return model


LINE, BEND = (lambda n: 7 * n + 5), (lambda n: 7 * n + 5 + (n > 3))


@pytest.mark.parametrize(
    ("steps", "alike", "asked"),
    [
        (Depths(LINE, 1, 9, 1), None, [2, 3, 4]),
        (Depths(BEND, 1, 9, 1), None, [2, 3, 4, 20]),
        (Depths(LINE, 1, 9, 1), True, [2, 3]),
        (Depths(LINE, 1, 9, 1), False, [20]),
        # the peak of a few layers is at another place than that of many
        (Depths(LINE, 1, 9, 120), None, [2, 3, 4]),
        (Depths(LINE, 90, 9, 1), True, [2, 3]),
        (Depths(LINE, 1, 9, 1000), True, [2, 3]),
        (Depths(LINE, 1, 9, 1, hidden=50), True, [2, 3, 4, 20]),
    ],
)
def test_what_is_run(steps, alike, asked):
    model, expected = of_layers(20), steps.step(20)
    steps.asked.clear()
    found = whole_step(model, steps, find_runs(model), alike)
    assert steps.asked == asked
    assert (found.step.kept, found.step.peak, found.alike) == (expected.kept, expected.peak, 20 not in asked)
