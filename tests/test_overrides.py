"""`CompressionConfig.overrides` sets codecs of single layers: it reaches the right modules and changes their bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actcompress import PRESETS, CompressionConfig, kept_bytes, patch_model, patch_report
from hf_actcompress.config_checks import CODEC_FIELDS
from hf_actcompress.errors import UnknownOptionError
from tests.families import BY_NAME

INT4_MLP = (("layers.1", "mlp", "int4"),)
pytestmark = pytest.mark.filterwarnings("ignore")


def test_an_override_holds_below_its_module_alone() -> None:
    config = CompressionConfig(mlp="int8", overrides=(("layers.1", "mlp", "int4"), ("layers.1.mlp", "mlp", "fp8_e4m3")))
    assert config.at("model.layers.0.mlp").mlp == config.at("model.layers.11.mlp").mlp == "int8"
    assert config.at("model.layers.1.self_attn").mlp == "int4"
    # the later one wins
    assert config.at("base_model.model.model.layers.1.mlp").mlp == "fp8_e4m3"
    assert config.at("model.layers.1.mlp").norm == "identity"


@given(st.sampled_from(CODEC_FIELDS), st.integers(0, 11), st.integers(0, 11))
@settings(deadline=None)
def test_no_layer_takes_anothers_override(role: str, asked: int, seen: int) -> None:
    config = CompressionConfig(overrides=((f"h.{asked}", role, "int8"),))
    found = config.at(f"transformer.h.{seen}.mlp.act")
    assert getattr(found, role) == ("int8" if asked == seen else "identity")


@pytest.mark.parametrize(
    ("role", "codec", "named"),
    [("mpl", "int8", "field of an override"), ("mlp", "int9", "codec"), ("norm", "topk10", "codec")],
)
def test_an_unknown_role_or_codec_is_named(role: str, codec: str, named: str) -> None:
    with pytest.raises(UnknownOptionError, match=named):
        CompressionConfig(overrides=(("layers.0", role, codec),))


def test_attention_of_single_checkpointed_layers_may_be_kept() -> None:
    kept = ("layers.1", "checkpoint_attention", "kept")
    config = CompressionConfig(overrides=(kept, ("layers.0", "checkpoint_input", "int8")))
    assert config.at("model.layers.1").checkpoint_attention == "kept"
    assert config.at("model.layers.0").checkpoint_attention == "recomputed"
    with pytest.raises(UnknownOptionError, match="maybe"):
        CompressionConfig(overrides=(("layers.1", "checkpoint_attention", "maybe"),))
    # attention is kept with statistics of the exact q and k, which do not fit an input that was rounded
    with pytest.raises(UnknownOptionError, match="checkpoint_input"):
        CompressionConfig(overrides=(kept, ("layers.1", "checkpoint_input", "int8")))
    with pytest.raises(UnknownOptionError, match="checkpoint_input"):
        CompressionConfig(checkpoint_input="int8", overrides=(kept,))


@pytest.mark.parametrize("role", CODEC_FIELDS)
def test_a_lossy_override_makes_the_config_lossy(role: str) -> None:
    assert not CompressionConfig(overrides=(("layers.0", role, "int8"),)).lossless
    assert CompressionConfig(overrides=(("layers.0", role, "offload"),)).lossless


def test_the_model_and_its_bytes_follow() -> None:
    family = BY_NAME["llama"]
    batch = family.make_batch("none")
    model = patch_model(family.build(torch.float32), CompressionConfig(overrides=INT4_MLP))
    codecs = {row.name: row.codec for row in patch_report(model).rows if row.role == "gated_mlp"}
    assert codecs == {"model.layers.0.mlp": "identity", "model.layers.1.mlp": "int4"}
    one = kept_bytes(lambda: model(**batch), "cpu")
    none = kept_bytes(lambda: patch_model(model)(**batch), "cpu")
    both = kept_bytes(lambda: patch_model(model, CompressionConfig(mlp="int4"))(**batch), "cpu")
    assert none - one == one - both > 0


def test_a_config_may_be_carried() -> None:
    class Carrier:
        config = PRESETS["int8"]

    model = patch_model(BY_NAME["llama"].build(torch.float32), Carrier())
    assert {row.codec for row in patch_report(model).rows if row.role == "norm"} == {PRESETS["int8"].norm}


def test_an_override_that_meets_no_module_is_named() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    with pytest.raises(UnknownOptionError, match="layers.99"):
        patch_model(model, CompressionConfig(overrides=(("layers.99", "mlp", "int8"),)))
    assert not any(hasattr(module, "actcompress") for module in model.modules())
