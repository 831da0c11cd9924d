"""`CompressionConfig.checkpoint` names the layers that are recomputed in backward."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from hf_actcompress import CompressionConfig, kept_bytes, patch_model, patch_report, unpatch_model
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.modules.checkpoint import CheckpointInputMixin
from tests.families import BY_NAME, build, differing, step

NAMES = ("bert", "gpt2-gelu-tanh", "llama", "t5")
LAYERS = {"bert": "layer.0", "gpt2-gelu-tanh": "h.0", "llama": "layers.0", "t5": "decoder.block.1"}


def flags(model):
    return [{k: v for k, v in m.__dict__.items() if "checkpointing" in k} for m in model.modules()]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_without(name):
    family = BY_NAME[name]
    model, batch = build(family, "fp32", dropout=0.1), family.make_batch()
    exact = step(patch_model(model), batch)
    patch_model(model, CompressionConfig(checkpoint=(LAYERS[name],)))
    again = step(model, batch)
    assert torch.equal(exact[0], again[0])
    assert not differing(exact[1], again[1])
    rows = [row for row in patch_report(model).rows if row.role == "checkpoint"]
    assert len(rows) == 1 and rows[0].name.endswith(LAYERS[name])


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_less_is_kept_for_every_layer(name):
    family = BY_NAME[name]
    model, batch = build(family, "fp32"), family.make_batch()

    def kept(*parts: str) -> int:
        patch_model(model, CompressionConfig(checkpoint=parts))
        return kept_bytes(lambda: model(**batch), "cpu")

    one = LAYERS[name]
    both = one.rpartition(".")[0]
    assert kept(both) < kept(one) < kept()


def test_unpatching_gives_the_flags_back():
    model = build(BY_NAME["llama"], "fp32")
    before = flags(model)
    patch_model(model, CompressionConfig(checkpoint=("layers.1",)))
    assert flags(model) != before
    # another config starts again from the stock flags
    patch_model(model, "exact")
    assert flags(model) == before
    model.gradient_checkpointing_enable()
    enabled = flags(model)
    patch_model(model, CompressionConfig(checkpoint=("layers.1",)))
    unpatch_model(model)
    assert flags(model) == enabled


def test_copies_and_pickles_can_be_unpatched():
    model = patch_model(build(BY_NAME["llama"], "fp32"), CompressionConfig(checkpoint=("layers.1",)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        layers = other.model.layers
        assert [layer.gradient_checkpointing for layer in layers] == [False, True]
        unpatch_model(other)
        assert not any(layer.gradient_checkpointing for layer in layers)
    assert model.model.layers[1].gradient_checkpointing


def test_a_layer_that_is_not_there_is_refused_and_nothing_is_patched():
    model = build(BY_NAME["llama"], "fp32")
    with pytest.raises(UnknownOptionError, match="layers.7"):
        patch_model(model, CompressionConfig(checkpoint=("layers.0", "layers.7")))
    assert flags(model) == flags(build(BY_NAME["llama"], "fp32"))


def test_a_layer_whose_forward_is_bound_keeps_its_input_through_the_codec_all_the_same():
    """The hooks of device_map bind a forward in this way. Such a layer still calls the checkpoint function."""
    model = build(BY_NAME["llama"], "fp32")
    layer = model.model.layers[0]
    layer.forward = layer.forward
    patch_model(model, CompressionConfig(checkpoint_input="int8_outliers"))
    assert isinstance(layer, CheckpointInputMixin) and layer.actcompress.codec == CODECS["int8_outliers"]
