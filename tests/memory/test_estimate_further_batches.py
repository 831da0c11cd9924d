"""A further batch of a model under a config: its two layers are run once, and say what all others add."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation import copies
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.memory.estimation.fake_step.step import FakeStep
from hf_actcompress.memory.estimation.growth import growth_of, unit_of

_SIZES = {"vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
_HEADS = {**_SIZES, "num_key_value_heads": 2, "num_hidden_layers": 12}
_T5 = {"vocab_size": 67, "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0}
_GPT2 = {"vocab_size": 67, "n_embd": 64, "n_layer": 9, "n_head": 4, "n_positions": 64}
BERT, LLAMA = hf.BertConfig(**_SIZES, num_hidden_layers=9), hf.LlamaConfig(**_HEADS)
GEMMA = hf.Gemma2Config(**_HEADS, head_dim=16, sliding_window=16)
T5 = hf.T5Config(**_T5, num_layers=7, num_decoder_layers=8)
CASES: dict[str, tuple[Any, str | None, bool, dict[str, Any]]] = {
    "stock": (BERT, None, False, {}),
    "autocast": (BERT, "exact", False, {"autocast": "bf16"}),
    "offload": (hf.GPT2Config(**_GPT2), "offload", False, {}),
    "adapters": (LLAMA, "int8", False, {"lora": 4, "dtype": "bf16"}),
    "checkpointing": (LLAMA, "long", True, {"device": "cpu"}),
    "layers in turn": (GEMMA, "exact", False, {}),
    "an encoder and a decoder": (T5, "exact", False, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_its_bytes_are_those_of_an_estimate_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, preset, checkpointing, options = CASES[name]
    several, ran, run = Estimates(config, **options), [], copies.run_again
    monkeypatch.setattr(copies, "run_again", lambda copy, *given, **more: ran.append(copy) or run(copy, *given, **more))
    several.estimate(3, 32, preset, checkpointing)
    for batch, length in ((20, 32), (3, 48)):
        ran.clear()
        found = several.device_bytes(batch, length, preset, checkpointing)
        assert len(ran) == 1
        alone = estimate(
            config, batch_size=batch, seq_len=length, config=preset, gradient_checkpointing=checkpointing, **options
        )
        assert found == alone.device_bytes


def step(layers: int, layer: int, head: int, turns: int = 1) -> FakeStep:
    """Of layers that each keep so much, with a head in so many turns."""
    forward = [7, *(7 + layer * i + more for i in range(layers) for more in (layer, layer // 2))]
    kept = 7 + layer * layers
    backward = [kept + head] * turns + [kept - layer * i + more for i in range(layers) for more in (3, layer)] + [9]
    return FakeStep(kept, max(*forward, *backward), {}, [*forward, kept + head], backward)


def test_where_the_units_are() -> None:
    base, longer = step(2, 8, 5), step(3, 8, 5)
    unit = unit_of(base, longer, growth_of(base, longer))
    assert unit is not None and unit.apart == (2, 2)
    # a head of more turns moves nothing that is counted
    found, expected = (unit.growth(step(2, 80, 50, 4)), growth_of(step(2, 80, 50, 4), step(3, 80, 50, 4)))
    assert found is not None and (found.forward, found.backward) == (expected.forward, expected.backward)
    assert found.step.kept == expected.step.kept == 80


def test_what_has_another_form_is_run() -> None:
    base, longer = step(2, 8, 5), step(3, 8, 5)
    unit = unit_of(base, longer, growth_of(base, longer))
    assert unit is not None
    other = step(2, 80, 50)
    # an allocation more in the first layer, and one in the second
    for place in (2, 4):
        forward = [*other.forward[:place], 1000, *other.forward[place:]]
        assert unit.growth(FakeStep(other.kept, 1000, {}, forward, other.backward)) is None
    # nothing at all
    assert unit.growth(FakeStep(7, 7, {}, [7], [7])) is None
    # layers of two kinds
    uneven = FakeStep(0, 0, {}, [7, 9, 8, 30, 20, 21], base.backward)
    assert unit_of(uneven, longer, growth_of(uneven, longer)) is None
