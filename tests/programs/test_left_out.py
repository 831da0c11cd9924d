"""Programs keep nothing of padding rows and of rows that repeat others. Values and bytes are those of the leaf path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.errors import PaddingError, SharedRowsError
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, Batch, Gradients, cast_batch, mode_of, step
from tests.memory.test_padding_bytes import INT8, LENGTH, padded_batch
from tests.models.test_drop_padding import batch_of
from tests.models.test_shared_prompts import build, group
from tests.programs import test_falcon as falcon
from tests.programs import test_own_attention as own
from tests.programs.pairs import DTYPES, MODES, calls
from tests.programs.test_adapters import KINDS, TARGETS, adapted
from tests.slopes import bert, llama, slope

pytestmark = [pytest.mark.daily(3), pytest.mark.filterwarnings("ignore:.*lossy")]
NAMES = (
    "llama",
    "qwen3",
    "gemma",
    "phi3",
    "gpt2-gelu-new",
    "gpt2-gelu-tanh",
    "bert",
    "distilbert",
    "modernbert",
    "opt",
)
Result = tuple[Tensor, Gradients]


def same(found: Result, expected: Result) -> bool:
    return torch.equal(found[0], expected[0]) and all(torch.equal(found[1][n], x) for n, x in expected[1].items())


def dropping(programs: bool, **options: Any) -> CompressionConfig:
    return CompressionConfig(drop_padding=True, programs=programs, **options)


def kept_of(model: Any, batch: Batch, mode: str = "fp32") -> int:
    with mode_of(mode):
        return kept_bytes(lambda: model(**cast_batch(batch, DTYPES[mode])).loss, "cpu")


def assert_drops(make: Callable[[], Any], batch: Batch, mode: str = "fp32", **options: Any) -> None:
    """The gradients are those with padding kept, and the kept bytes are at most those of the leaf path."""
    whole, leaves, programs = (
        patch_model(make(), config)
        for config in (CompressionConfig(**options), dropping(False, **options), dropping(True, **options))
    )
    expected, found = step(whole, batch, mode), step(programs, batch, mode)
    assert same(found, expected)
    assert set(calls(programs)) == {1}
    kept = [kept_of(model, batch, mode) for model in (whole, leaves, programs)]
    assert kept[2] <= kept[1] < kept[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("padding", ("right", "left"))
def test_the_gradients_with_padding_kept_and_the_leaf_paths_bytes(name: str, mode: str, padding: str) -> None:
    family = BY_NAME[name]
    assert_drops(partial(family.build, DTYPES[mode]), batch_of(family, padding), mode)


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_are_cut_at_their_attention(name: str) -> None:
    """A CPU has no kernel for dropout of probabilities, so such layers are cut at their attention."""
    family, results = BY_NAME[name], []
    for config in (CompressionConfig(), dropping(True)):
        model = patch_model(family.build(dropout=0.1), config)
        results.append((step(model, batch_of(family)), kept_of(model, batch_of(family))))
        assert set(calls(model)) == {2}
    (expected, whole), (found, fewer) = results
    assert same(found, expected) and fewer < whole


@pytest.mark.parametrize("name", ("llama", "bert"))
def test_through_a_codec(name: str) -> None:
    assert_drops(BY_NAME[name].build, batch_of(BY_NAME[name]), **INT8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TARGETS)
def test_adapters(name: str, kind: str) -> None:
    batch = batch_of(BY_NAME[name])
    whole, programs = (
        adapted(name, torch.float32, False, config, **KINDS[kind]) for config in (CompressionConfig(), dropping(True))
    )
    torch.manual_seed(1)
    expected = step(whole, batch)
    torch.manual_seed(1)
    assert same(step(programs, batch), expected)
    assert set(calls(programs)) == {1}
    assert kept_of(programs, batch) < kept_of(whole, batch)


@pytest.mark.parametrize("name", ("gemma2", *falcon.FORMS))
def test_attention_that_runs_again(name: str) -> None:
    if name == "gemma2":
        make, batch = partial(own.build, name, torch.float32), batch_of(BY_NAME["llama"])
    else:
        make, batch = partial(falcon.build, name), falcon.make_batch()
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    results = []
    for config in (CompressionConfig(), dropping(True)):
        model = patch_model(make(), config)
        results.append(step(model, batch))
        assert set(calls(model)) == {1}
    assert same(results[1], results[0])


@pytest.mark.parametrize("build_", (llama, bert))
def test_checkpointed_layers_keep_real_rows_of_their_input(build_: Any) -> None:
    batch = padded_batch(0.5)

    def prepare(model: Any, drop: bool) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return patch_model(model, CompressionConfig(drop_padding=drop))

    whole, fewer = (
        slope(partial(build_, hidden=256), prepare=partial(prepare, drop=drop), batch=batch, length=LENGTH).kept
        for drop in (False, True)
    )
    assert whole - fewer == pytest.approx(2 * 0.5)


@pytest.mark.parametrize("name", ("llama", "bert", "gpt2-gelu-new"))
def test_checkpointed_layers_have_the_same_gradients(name: str) -> None:
    results = []
    for drop in (False, True):
        model = BY_NAME[name].build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        patch_model(model, CompressionConfig(drop_padding=drop))
        results.append(step(model, batch_of(BY_NAME[name])))
        assert set(calls(model)) == {1}
    assert same(results[1], results[0])


@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_gradient_that_reaches_padding_in_the_last_layers_output_raises(checkpointed: bool) -> None:
    model = patch_model(BY_NAME["llama"].build(), dropping(True))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = batch_of(BY_NAME["llama"])
    outputs: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
    loss, real = model(**batch).loss, batch["attention_mask"][..., None]
    ((outputs[0] * real).sum() + loss).backward(retain_graph=True)
    with pytest.raises(PaddingError, match="reached a padding row"):
        (outputs[0].sum() + loss).backward()
    assert calls(model) == [1, 1]


def test_a_gradient_of_cached_keys_that_reaches_padding_raises() -> None:
    model = patch_model(BY_NAME["llama"].build(), dropping(True))
    batch = batch_of(BY_NAME["llama"])
    found = model(**batch, use_cache=True)
    keys = found.past_key_values.layers[0].keys
    real = batch["attention_mask"][:, None, :, None]
    (found.loss + (keys * real).sum()).backward(retain_graph=True)
    with pytest.raises(PaddingError, match="reached a padding row"):
        (found.loss + keys.sum()).backward()
    assert calls(model) == [1, 1]


def with_mask(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Gives a layer another mask than the model's."""

    def exchange(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": change(kwargs["attention_mask"])}

    layer.register_forward_pre_hook(exchange, with_kwargs=True)


def test_real_tokens_that_attend_to_padding_raise() -> None:
    model = patch_model(BY_NAME["llama"].build(), dropping(True))
    with_mask(model.model.layers[0], torch.ones_like)
    loss = model(**batch_of(BY_NAME["llama"])).loss
    with pytest.raises(PaddingError, match="attend to padding"):
        loss.backward()
    assert calls(model) == [1, 1]


def test_repeated_rows_are_kept_once() -> None:
    batch, results, kept, stock = group(padding=2), [], [], build("llama")
    for programs in (False, True):
        config = CompressionConfig(share_prompts=True, programs=programs)
        model = patch_model(copy.deepcopy(stock), config)
        results.append(step(model, batch))
        kept.append(kept_of(model, batch))
    assert same(results[1], results[0])
    assert set(calls(model)) == {2}
    assert kept[1] <= kept[0] < kept_of(patch_model(stock), batch)


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
