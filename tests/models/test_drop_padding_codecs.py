"""`drop_padding=True` beside codecs and variants: what is dropped is not packed, and the error is not larger."""

from __future__ import annotations

import inspect

import pytest
import torch

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.config import PRESETS
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, oracle_step, relative_error, step
from tests.models.test_drop_padding import batch_of, both, main

pytestmark = pytest.mark.daily(6)

CODED = {
    "int8": CompressionConfig(linear="int8", norm="int8", mlp="int8", attention="int8"),
    "int4": CompressionConfig(linear="int4", norm="int4", mlp="int4", attention="int8"),
    "fp8": PRESETS["fp8"],
    "offload": PRESETS["offload"],
    "dropit": PRESETS["dropit"],
    "inverted": PRESETS["inverted"],
    "fewbit": PRESETS["fewbit"],
    "derivative": CompressionConfig(activation_variant="derivative"),
    "recomputed": CompressionConfig(attention_variant="recomputed", attention="int8"),
    "tempo": PRESETS["tempo"],
}


@main
@pytest.mark.parametrize("name", CODED)
def test_with_codecs_and_variants(family, name):
    """A row's code does not depend on other rows, so the gradients are the same as with padding kept.

    The last bit may differ: decoded tensors of attention may have another order in memory, which changes sums.
    """
    attention = "eager" if name == "tempo" else "sdpa"
    options = {field: getattr(CODED[name], field) for field in inspect.signature(CompressionConfig).parameters}
    del options["drop_padding"]
    for dropout in (0.0, 0.1):
        # on a CPU attention with dropout is not fused, so that layers drop rows module by module
        options["plans"] = not dropout
        model = family.build(dropout=dropout, attn_implementation=attention)
        (loss, grads), (dropped_loss, dropped) = both(model, batch_of(family), **options)
        assert torch.equal(loss, dropped_loss)
        assert relative_error(dropped, {name: x.double() for name, x in grads.items()}) < torch.finfo(torch.float32).eps


def test_outlier_channels_are_those_of_the_real_rows():
    """All rows decide which channels are stored separately. Without padding, these fit the real tokens better."""
    family, errors = BY_NAME["llama"], []
    model, batch = family.build(), batch_of(family)
    oracle = oracle_step(model, batch)
    # padding has its large values in another channel than text
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 0)
    with torch.no_grad():
        model.get_input_embeddings().weight[0, 3] = 100.0
    oracle = oracle_step(model, batch)
    for drop in (False, True):
        config = CompressionConfig.from_preset("int4", drop_padding=drop)
        errors.append(relative_error(step(patch_model(model, config), batch)[1], oracle))
    assert 0 < errors[1] < errors[0]


def test_groups_of_tokens_are_of_real_ones():
    """Attention keeps fewer bytes. Its groups then cross the border between two sequences, which changes the error."""
    family = BY_NAME["llama"]
    model, batch = family.build(), batch_of(family)
    oracle, errors, kept = oracle_step(model, batch), [], []
    for drop in (False, True):
        config = CompressionConfig(attention="int4_channels", attention_variant="recomputed", drop_padding=drop)
        errors.append(relative_error(step(patch_model(model, config), batch)[1], oracle))
        kept.append(kept_bytes(lambda: model(**batch).loss, "cpu"))
    # groups over heads instead of tokens would mix the ranges of several heads and exceed these bounds
    assert 0 < errors[0] < 0.02 and 0 < errors[1] < 0.04
    assert kept[1] < kept[0]
