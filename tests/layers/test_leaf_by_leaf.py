"""Which calls and layers plans leave to the leaf path, and what the report says about them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from tests.families import BY_NAME, Batch, cast_batch, differing, step
from tests.layers.plans import LEAVES, PLANS, assert_same, calls, pair, plans_of


def hook(model: Any, batch: Batch) -> Batch:
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: None)
    return batch


def filled_cache(model: Any, batch: Batch) -> Batch:
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"][:, :4], use_cache=True).past_key_values
    assert isinstance(cache, DynamicCache)
    return {"input_ids": batch["input_ids"][:, 4:], "past_key_values": cache, "labels": batch["labels"][:, 4:]}


def hook_everywhere(model: Any, batch: Batch) -> Batch:
    nn.modules.module.register_module_forward_hook(lambda *_: None)
    return batch


def own_forward(model: Any, batch: Batch) -> Batch:
    for layer in model.model.layers:
        layer.self_attn.q_proj.forward = layer.self_attn.q_proj.forward
    return batch


def exchanged(model: Any, batch: Batch) -> Batch:
    model.model.layers[0].mlp.up_proj = copy.deepcopy(unpatch_model(copy.deepcopy(model)).model.layers[0].mlp.up_proj)
    return batch


def eager(model: Any, batch: Batch) -> Batch:
    model.config._attn_implementation = "eager"
    return batch


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrised(model: Any, batch: Batch) -> Batch:
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Twice())
    return batch


def in_bf16(model: Any, batch: Batch) -> Batch:
    return cast_batch(batch, model.to(torch.bfloat16).dtype)


Change = Callable[[Any, Batch], Batch]
# what makes layers go module by module, and the reason
LEAF_BY_LEAF: dict[str, tuple[Change, str]] = {
    "a hook inside": (hook, "a module in it has hooks or a forward of its own"),
    "a hook on every module": (hook_everywhere, "a module in it has hooks or a forward of its own"),
    "a forward of its own": (own_forward, "a module in it has hooks or a forward of its own"),
    "a filled cache": (filled_cache, "its cache has keys and values already"),
}
# what changes a layer, which has another plan then
BY_PLANS: dict[str, Change] = {
    "an exchanged child": exchanged, "eager attention": eager, "a parametrised weight": parametrised, "bf16": in_bf16,
}  # fmt: skip


@pytest.mark.parametrize("what", LEAF_BY_LEAF)
def test_calls_that_go_leaf_by_leaf(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is stock's, and the gradients have the bits of the leaf path."""
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    change, why = LEAF_BY_LEAF[what]
    stock, plans = pair("llama")
    leaves, results = patch_model(copy.deepcopy(stock), LEAVES), []
    for model in (stock, leaves, plans):
        results.append(step(model, change(model, BY_NAME["llama"].make_batch())))
    (expected, gradients), (_, wanted), (loss, grads) = results
    assert torch.equal(loss, expected) and not differing(grads, wanted)
    torch.testing.assert_close(grads, gradients)
    assert calls(plans) == [0, 0] and [layer.leaf_calls for layer in plans_of(plans)] == [1, 1]
    assert all(why in layer.why for layer in plans_of(plans))


@pytest.mark.parametrize("trained", [False, True], ids=["before the first step", "after a step"])
@pytest.mark.parametrize("what", BY_PLANS)
def test_changes_that_need_another_plan(what: str, trained: bool) -> None:
    stock, plans = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    if trained:
        assert_same(plans, stock, batch)
    changed = [BY_PLANS[what](model, batch) for model in (stock, plans)]
    assert_same(plans, stock, changed[1])
    assert calls(plans) == [1 + trained] * 2 and not any(layer.leaf_calls for layer in plans_of(plans))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_hooks_of_transformers_count_while_they_capture(name: str, checkpointed: bool) -> None:
    """After one call that asks for hidden states or attentions, these hooks stay on the layers and inside of them."""
    stock, plans = pair(name)
    batch = BY_NAME[name].make_batch("right")
    for model in (stock, plans):
        if checkpointed:
            model.gradient_checkpointing_enable()
    asked = [model(**batch, output_hidden_states=True, output_attentions=True) for model in (stock, plans)]
    assert asked[0].hidden_states and all(map(torch.equal, asked[0].hidden_states, asked[1].hidden_states))
    assert calls(plans) == [0, 0]
    assert_same(plans, stock, batch)
    assert calls(plans) == [1, 1]


def test_no_grad_goes_leaf_by_leaf() -> None:
    stock, plans = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    with torch.no_grad():
        assert torch.equal(plans(**batch).logits, stock(**batch).logits)
    assert calls(plans) == [0, 0]


@pytest.mark.parametrize("preset", ["tempo", "fewbit"])
def test_other_presets_go_leaf_by_leaf_and_the_report_says_why(preset: str) -> None:
    model = patch_model(BY_NAME["llama"].build(), CompressionConfig.from_preset(preset))
    notes = {row.note for row in patch_report(model).rows if row.role == "layer"}
    assert notes == {"mlp.act_fn keeps something in a way that plans do not know; it runs module by module"}


def test_the_report_names_layers_that_run_by_plans() -> None:
    bloom = patch_model(BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)), PLANS)
    for model in (pair("llama")[1], bloom):
        rows = [row for row in patch_report(model).rows if row.role == "layer"]
        assert [(row.kind, row.note) for row in rows] == [("plan", "")] * 2


def test_the_report_says_which_calls_went_leaf_by_leaf() -> None:
    model, batch = pair("llama")[1], BY_NAME["llama"].make_batch("right")
    model(**batch).loss.backward()
    model(**batch, unknown=3).loss.backward()
    assert "module by module" not in str(patch_report(model))
    model(**batch, unknown={3}).loss.backward()
    with torch.no_grad():
        model(**batch, unknown={3})
    (note,) = {row.note for row in patch_report(model).rows if row.role == "layer"}
    assert note == "1 of 3 calls ran module by module; of the last one, it is called with a set"


class ScaledLayer(type(BY_NAME["llama"].build().model.layers[0])):  # type: ignore[misc]
    """Computes something else for up to 100 tokens than for more."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(hidden_states, **kwargs)
        return y if hidden_states.size(1) > 100 else y + 0.125 * hidden_states


def test_a_layer_that_does_something_else_has_plans_of_what_it_does() -> None:
    """A graph for any sizes holds for those on one side of what the code has asked about them."""
    stock = BY_NAME["llama"].build(max_position_embeddings=128)
    for layer in stock.model.layers:
        layer.__class__ = ScaledLayer
    plans = patch_model(copy.deepcopy(stock), PLANS)
    lengths = (13, 120, 9, 110, 101, 100)
    for length in lengths:
        ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(length))
        assert_same(plans, stock, {"input_ids": ids, "labels": ids})
    assert calls(plans) == [len(lengths)] * 2
    # one for the first sizes, and one for any sizes on either side
    assert len(plans_of(plans)[0].known()) == 3


def test_a_model_patched_before_it_is_trained() -> None:
    """`from_pretrained` returns a model in eval mode. Later changes of the mode do not matter either."""
    stock = BY_NAME["bert"].build(dropout=0.1).eval()
    plans, batch = patch_model(copy.deepcopy(stock), PLANS), BY_NAME["bert"].make_batch()
    assert {row.kind for row in patch_report(plans).rows if row.role == "layer"} == {"plan"}
    for i, training in enumerate((True, False, True), 1):
        stock.train(training)
        plans.train(training)
        assert_same(plans, stock, batch)
        assert calls(plans) == [i, i]


@pytest.mark.parametrize("name", ["llama", "gpt2-gelu-new"])
def test_an_input_in_the_order_of_channels(name: str) -> None:
    """A convolution makes such an input. Llama's norm keeps its memory order, in which products round differently."""
    stock, plans = pair(name)
    # an odd length, for which products of the two orders differ
    ids = BY_NAME[name].make_batch()["input_ids"][:, :5]
    embeds = stock.get_input_embeddings()(ids).detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(plans, stock, {"inputs_embeds": embeds, "labels": ids, "use_cache": False})
    assert calls(plans) == [1, 1]
