"""Layers keep nothing of padding rows and of rows that repeat others. They run module by module then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.errors import PaddingError, SharedRowsError
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, Batch, Gradients, cast_batch, mode_of, step
from tests.layers.plans import DTYPES
from tests.models.test_drop_padding import batch_of
from tests.models.test_shared_prompts import build, group

pytestmark = [pytest.mark.daily(3), pytest.mark.filterwarnings("ignore:.*lossy")]
Result = tuple[Tensor, Gradients]


def same(found: Result, expected: Result) -> bool:
    return torch.equal(found[0], expected[0]) and all(torch.equal(found[1][n], x) for n, x in expected[1].items())


def kept_of(model: Any, batch: Batch, mode: str = "fp32") -> int:
    with mode_of(mode):
        return kept_bytes(lambda: model(**cast_batch(batch, DTYPES[mode])).loss, "cpu")


@pytest.mark.parametrize("name", ("llama", "bert", "gpt2-gelu-new"))
def test_checkpointed_layers_have_the_same_gradients(name: str) -> None:
    results = []
    for drop in (False, True):
        model = BY_NAME[name].build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        patch_model(model, CompressionConfig(drop_padding=drop))
        results.append(step(model, batch_of(BY_NAME[name])))
    assert same(results[1], results[0])


def test_a_gradient_that_reaches_padding_in_the_last_layers_output_raises() -> None:
    model = patch_model(BY_NAME["llama"].build(), CompressionConfig(drop_padding=True))
    batch = batch_of(BY_NAME["llama"])
    outputs: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    loss, real = model(**batch).loss, batch["attention_mask"][..., None]
    ((outputs[0] * real).sum() + loss).backward(retain_graph=True)
    with pytest.raises(PaddingError, match="reached a padding row"):
        (outputs[0].sum() + loss).backward()


def test_a_gradient_of_cached_keys_that_reaches_padding_raises() -> None:
    model = patch_model(BY_NAME["llama"].build(), CompressionConfig(drop_padding=True))
    batch = batch_of(BY_NAME["llama"])
    found = model(**batch, use_cache=True)
    keys = found.past_key_values.layers[0].keys
    real = batch["attention_mask"][:, None, :, None]
    (found.loss + (keys * real).sum()).backward(retain_graph=True)
    with pytest.raises(PaddingError, match="reached a padding row"):
        (found.loss + keys.sum()).backward()


def with_mask(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Gives a layer another mask than the model's."""

    def exchange(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": change(kwargs["attention_mask"])}

    layer.register_forward_pre_hook(exchange, with_kwargs=True)


def test_real_tokens_that_attend_to_padding_raise() -> None:
    model = patch_model(BY_NAME["llama"].build(), CompressionConfig(drop_padding=True))
    with_mask(model.model.layers[0], torch.ones_like)
    loss = model(**batch_of(BY_NAME["llama"])).loss
    with pytest.raises(PaddingError, match="attend to padding"):
        loss.backward()


def test_repeated_rows_are_kept_once() -> None:
    batch, results, kept, stock = group(padding=2), [], [], build("llama")
    for share in (False, True):
        model = patch_model(copy.deepcopy(stock), CompressionConfig(share_prompts=share))
        results.append(step(model, batch))
        kept.append(kept_of(model, batch))
    assert same(results[1], results[0]) and kept[1] < kept[0]


def test_rows_that_an_attention_makes_differ_raise_in_the_next_layer() -> None:
    model = patch_model(build("llama"), CompressionConfig(share_prompts=True))

    def others(mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask[1:, :, 3:, 2] = False
        return mask

    with_mask(model.model.layers[0], others)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(30)
    loss = model(**group(padding=2)).loss
    with pytest.raises(SharedRowsError, match="share_prompts=False"):
        loss.backward()
