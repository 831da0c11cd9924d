"""Models and configs for which tokens cannot be chosen raise errors that say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.errors import UnknownOptionError, UnsupportedModelError
from tests.families import BY_NAME, step
from tests.integration.test_chosen_tokens import SHARE, scores_of
from tests.integration.test_token_choice import CLASSES, classifier


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (lambda: BY_NAME["t5"].build(), "encoder-decoder"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "none of transformers' layers"),
    ],
)
def test_models_of_which_none_can_be_chosen(model: Any, match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        patch_model(model(), CompressionConfig(tokens=SHARE))


def test_layers_in_which_tokens_meet_elsewhere() -> None:
    ids = torch.randint(3, 60, (2, 16))
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2}
    models = [
        MambaForCausalLM(MambaConfig(**sizes, state_size=4, use_mambapy=False)),
        FalconForCausalLM(FalconConfig(**sizes, num_attention_heads=4, alibi=True)),
    ]
    for model in models:
        patch_model(model, CompressionConfig(tokens=SHARE), strict=False)
        with pytest.raises(UnsupportedModelError, match="tokens < 1 needs"):
            model(input_ids=ids, labels=ids)


def test_a_layer_with_a_shift_is_refused() -> None:
    """Here a layer adds a neighbour token outside of attention; for chosen tokens alone that would be missing."""
    model, batch = BY_NAME["llama"].build(torch.float32), BY_NAME["llama"].make_batch()
    model.model.layers[1].mlp.register_forward_pre_hook(lambda _, args: (args[0] + args[0].roll(1, dims=1),))
    patch_model(model, CompressionConfig(tokens=SHARE))
    with pytest.raises(UnsupportedModelError, match="meet in attention alone"):
        model(**batch)


def test_configs() -> None:
    for options in ({"tokens": 0}, {"tokens": 1.5}, {"token_choice": "best"}, {"tokens": 0.5, "drop_padding": True}):
        with pytest.raises(UnknownOptionError):
            CompressionConfig(**options)
    plain = CompressionConfig(tokens=0.25, token_choice="last")
    assert CompressionConfig.from_json(plain.to_json()) == plain and not plain.lossless
    with pytest.raises(UnknownOptionError, match="scores_of"):
        CompressionConfig.from_json(CompressionConfig(tokens=0.25, token_choice=scores_of).to_json())


def test_scores_of_another_shape_and_labels_that_are_missing() -> None:
    family = BY_NAME["llama"]
    batch = family.make_batch()
    model = patch_model(family.build(), CompressionConfig(tokens=SHARE, token_choice=lambda inputs: torch.ones(3)))
    with pytest.raises(UnsupportedModelError, match="one for each token"):
        model(**batch)
    model = patch_model(family.build(), CompressionConfig(tokens=SHARE, token_choice="loss"))
    with pytest.raises(UnsupportedModelError, match="needs labels"):
        model(input_ids=batch["input_ids"])
    with pytest.raises(UnsupportedModelError, match="needs labels"):
        step(patch_model(classifier(), CompressionConfig(tokens=SHARE, token_choice="loss")), CLASSES)
