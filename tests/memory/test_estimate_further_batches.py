"""A further batch size for the same model and config: a model of two layers is run once and shows what others add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress import CompressionConfig
from hf_actcompress.layers import layer
from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation import model_copies
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.memory.estimation.extrapolation import Extrapolated
from hf_actcompress.memory.estimation.fake_step.step import FakeStep, History
from hf_actcompress.memory.estimation.growth import Growth, growth_of, peak_with, unit_of
from hf_actcompress.memory.estimation.guess import largest_batch, widths

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
    "norms as kernels": (LLAMA, "exact", False, {"dtype": "bf16"}),
    "checkpointing": (LLAMA, "long", True, {"device": "cpu"}),
    "layers in turn": (GEMMA, "exact", False, {}),
    "an encoder and a decoder": (T5, "exact", False, {}),
}
# steps with one more layer of each run: the backward of checkpointed layers has other allocations with a batch of 20,
# and that of the last layer has others than those of the layers before it
MORE = {"checkpointing": 1, "autocast": 1, "an encoder and a decoder": 2}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", CASES)
def test_its_bytes_are_those_of_an_estimate_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, preset, checkpointing, options = CASES[name]
    several, ran, run = Estimates(config, **options), [], model_copies.run_again
    monkeypatch.setattr(
        model_copies, "run_again", lambda copy, *given, **more: ran.append(copy) or run(copy, *given, **more)
    )
    first = several.estimate(3, 32, preset, checkpointing)
    # without roles the same steps are run, and no module is asked what it keeps
    bare = Estimates(config, **options).estimate(3, 32, preset, checkpointing, by_role=False)
    assert replace(bare, kept_by_role=first.kept_by_role) == first
    assert sum(bare.kept_by_role.values()) == first.kept_bytes
    for batch, length in ((20, 32), (3, 48)):
        ran.clear()
        found = several.device_bytes(batch, length, preset, checkpointing)
        assert len(ran) <= 1 + MORE.get(name, 0)
        alone = estimate(
            config, batch_size=batch, seq_len=length, config=preset, gradient_checkpointing=checkpointing, **options
        )
        assert found == alone.device_bytes


@pytest.mark.parametrize("lora", [None, 4])
def test_configs_and_batches_share_the_traces_of_layers(lora: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of layer is traced for the first batch and once for all others, whatever the head does."""
    traced, learn = [], layer.learn
    monkeypatch.setattr(layer, "learn", lambda *given: traced.append(given) or learn(*given))  # type: ignore[func-returns-value]
    several = Estimates(LLAMA, dtype="bf16", lora=lora)
    configs = [CompressionConfig(), CompressionConfig(loss_head=False), CompressionConfig(logits=True)]
    for batch in (3, 5, 7, 9, 11):
        for config in configs:
            several.device_bytes(batch, 32, config)
    # with LoRA the input of the first layer has no gradient
    kinds = 1 if lora is None else 2
    assert [given[2].free is not None for given in traced] == [False] * kinds + [True] * kinds


# bytes that a layer's backward has allocated at each of its places, beside what is kept
_WORK = (3, 8, 1, 5, 2)


def step(layers: int, layer: int, head: int, turns: int = 1) -> FakeStep:
    """A step of `layers` layers that keep `layer` bytes each, and of a head with so many allocations (`turns`)."""
    forward = [7, *(7 + layer * i + more for i in range(layers) for more in (layer, layer // 2))]
    kept = 7 + layer * layers
    backward = [kept + head] * turns + [kept - layer * i + more for i in range(layers) for more in _WORK] + [9]
    return FakeStep(kept, max(*forward, *backward), {}, [*forward, kept + head], backward)


def test_where_the_units_are() -> None:
    base, longer = step(2, 8, 5), step(3, 8, 5)
    unit = unit_of(base, longer, growth_of(base, longer))
    assert unit is not None and unit.apart == len(_WORK) == len(unit.places)
    # more allocations of the head do not change the result
    found, expected = (unit.growth(step(2, 80, 50, 4)), growth_of(step(2, 80, 50, 4), step(3, 80, 50, 4)))
    assert found is not None and (found.forward, found.backward) == (expected.forward, expected.backward)
    assert found.step.kept == expected.step.kept == 80


def test_what_a_unit_leaves_behind_is_followed() -> None:
    """Each layer leaves two bytes allocated until the end of the backward, where the peak of many layers is."""

    def leaves(layers: int) -> FakeStep:
        found = step(layers, 8, 5)
        backward = [live + 2 * max(0, (at - 1) // len(_WORK)) for at, live in enumerate(found.backward)]
        backward[-1] += 50
        return FakeStep(found.kept, max(*found.forward, *backward), {}, found.forward, backward)

    base, longer = leaves(2), leaves(3)
    growth = growth_of(base, longer)
    assert growth.behind[1] == 2 and unit_of(base, longer, growth) is None
    for more in (1, 2, 30):
        assert peak_with(base, [(growth, more)]) == leaves(2 + more).peak


def test_what_has_another_form_is_run() -> None:
    base, longer = step(2, 8, 5), step(3, 8, 5)
    unit = unit_of(base, longer, growth_of(base, longer))
    assert unit is not None
    other = step(2, 80, 50)
    # one more allocation in the backward of either layer
    for place in (3, 8):
        backward = [*other.backward[:place], 1000, *other.backward[place:]]
        assert unit.growth(FakeStep(other.kept, 1000, {}, other.forward, backward)) is None
    # a step without layers
    assert unit.growth(FakeStep(7, 7, {}, [7], [7])) is None
    # layers of two kinds
    uneven = FakeStep(0, 0, {}, base.forward, [28, 27, 30, 20, 26, 22, 18, 20, 12, 18, 14, 9])
    assert unit_of(uneven, longer, growth_of(uneven, longer)) is None


def test_the_guess_at_the_largest_batch() -> None:
    """The step has a batch of 2. The 100 bytes of a weight's size do not grow with the batch, and all others do."""
    weight = torch.empty(25)
    sizes = [100, 30, 40, -40, 20, -20, -30, -100]
    history = History(sizes, (1, 2, 3, 5), 4, (), [*range(len(sizes))], frozenset())
    base = FakeStep(30, 170, {}, (100, 130, 170), (150,), history)
    # two layers more, of 10 bytes each, from the second allocation on
    more = [(Growth(FakeStep(10, 0, {}), (2, 10), (1, 10)), 2)]
    found = Extrapolated(base, 10, True, base=base, more=more)
    for batch in (3, 7, 1000):
        peak = 100 + (170 - 100 + 20) * batch // 2
        assert largest_batch(found, 2, peak, widths([weight])) == batch
        assert largest_batch(found, 2, peak - 1, widths([weight])) == batch - 1
    assert largest_batch(found, 2, 0, widths([weight])) == 1
    assert largest_batch(Extrapolated(base, 10, True), 2, 1000, widths([weight])) is None
