"""Plans that leave rows out: which layers have one, and that a layer that combines rows has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, FAMILIES, Family, build, differing, mode_of, step
from tests.layers.plans import calls
from tests.layers.test_launches import DEPTHS
from tests.models.test_drop_padding import batch_of
from tests.models.test_shared_prompts import group

pytestmark = pytest.mark.daily(3)

PADDING = CompressionConfig(drop_padding=True)
TEXT = [family for family in FAMILIES if family.task in ("causal", "masked")]
CAUSAL = [family for family in TEXT if family.task == "causal"]

# what becomes of some rows of x [B, S, H] depends on others
COMBINING: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "gather": lambda x: x[:, torch.arange(x.size(1)).flip(0)],
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "other order": lambda x: x.transpose(0, 1).reshape(x.shape),
    "roll": lambda x: x.roll(1, 1),
    "softmax": lambda x: x.softmax(1),
    "sort": lambda x: x.sort(1).values,
    "variance": lambda x: x / x.flatten(0, 1).var(0),
}


class Combines(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(nn.functional.silu(x))


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", TEXT, ids=lambda family: family.name)
def test_layers_without_padding_run_by_plans(family: Family, mode: str) -> None:
    model = patch_model(build(family, mode), PADDING)
    for seed, length in ((0, 13), (1, 9)):
        batch = {name: x[:, :length].contiguous() for name, x in batch_of(family, seed=seed).items()}
        batch["attention_mask"][0, -2:] = 0
        batch["labels"][batch["attention_mask"] == 0] = -100
        step(model, batch, mode)
    assert set(calls(model)) == {2}


@pytest.mark.parametrize("family", CAUSAL, ids=lambda family: family.name)
def test_layers_with_rows_kept_once_run_by_plans(family: Family) -> None:
    model = patch_model(family.build(), CompressionConfig(share_prompts=True))
    batch = {name: x % 60 for name, x in group().items()}
    model(**batch).loss.backward()
    assert set(calls(model)) == {1}


@pytest.mark.parametrize("name", COMBINING)
def test_a_layer_that_combines_rows_has_no_plan(name: str) -> None:
    model = BY_NAME["llama"].build()
    model.model.layers[0].mlp.act_fn = Combines(COMBINING[name])
    patch_model(model, PADDING)
    model(**batch_of(BY_NAME["llama"]))
    first, *others = (layer.actcompress.plans for layer in model.model.layers)
    assert not first.calls and "may combine them" in first.why
    assert all(plans.calls == 1 for plans in others)


def test_attention_in_both_directions_without_a_mask_has_no_plan() -> None:
    model = BY_NAME["bert"].build()
    stock = type(model.bert.encoder.layer[0]).forward

    def without_mask(layer: Any, hidden: Tensor, mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        return stock(layer, hidden, None, *args, **kwargs)

    kind = type("WithoutMask", (type(model.bert.encoder.layer[0]),), {"forward": without_mask})
    model.bert.encoder.layer[0].__class__ = kind
    patch_model(model, PADDING)
    with mode_of("fp32"):
        model(**batch_of(BY_NAME["bert"]))
    assert "its attention has no mask" in model.bert.encoder.layer[0].actcompress.plans.why


@pytest.mark.parametrize("attention", ["recomputed", "kept"])
@pytest.mark.parametrize("name", ["bert", "gpt2-gelu-new", "llama"])
def test_a_checkpointed_layer_keeps_the_real_rows_of_its_input(name: str, attention: str) -> None:
    family, kept, results = BY_NAME[name], [], []
    batch = batch_of(family)
    share = float(batch["attention_mask"].float().mean())
    for drop in (False, True):
        config, of_depth = CompressionConfig(drop_padding=drop, checkpoint_attention=attention), []
        for layers in (1, 3):
            model = family.build(**{DEPTHS[name]: layers})
            model.gradient_checkpointing_enable({"use_reentrant": False})
            patch_model(model, config)
            of_depth.append(kept_bytes(lambda model=model: model(**batch).loss, "cpu"))  # type: ignore[misc]
        results.append(step(model, batch))
        assert calls(model) == [2, 2, 2]
        kept.append(of_depth[1] - of_depth[0])
    assert torch.equal(results[0][0], results[1][0]) and not differing(results[0][1], results[1][1])
    assert kept[1] == pytest.approx(share * kept[0], rel=0.01)
