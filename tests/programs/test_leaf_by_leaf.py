"""Which calls and layers programs leave to the leaf path, and what the report says about them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, DynamicCache

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from tests.families import BY_NAME, Batch, step
from tests.programs.pairs import LEAVES, PROGRAMS, assert_same, calls, pair


def hook(model: Any, batch: Batch) -> Batch:
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: None)
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
    projection = model.model.layers[0].self_attn.q_proj
    projection.forward = projection.forward
    return batch


def exchanged(model: Any, batch: Batch) -> Batch:
    model.model.layers[0].mlp.up_proj = copy.deepcopy(unpatch_model(copy.deepcopy(model)).model.layers[0].mlp.up_proj)
    return batch


def eager(model: Any, batch: Batch) -> Batch:
    model.config._attn_implementation = "eager"
    return batch


# what makes the first layer go module by module
LEAF_BY_LEAF: dict[str, Callable[[Any, Batch], Batch]] = {
    "a hook inside": hook,
    "a hook on every module": hook_everywhere,
    "a forward of its own": own_forward,
    "a filled cache": filled_cache,
    "eager attention": eager,
}


@pytest.mark.parametrize("what", LEAF_BY_LEAF)
def test_calls_that_go_leaf_by_leaf(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())
    leaves, programs = pair("llama")
    batches = [LEAF_BY_LEAF[what](model, BY_NAME["llama"].make_batch()) for model in (leaves, programs)]
    before = calls(programs)[0]
    (loss, grads), (expected, wanted) = step(programs, batches[1]), step(leaves, batches[0])
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(programs)[0] == before


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_hooks_of_transformers_count_while_they_capture(name: str, checkpointed: bool) -> None:
    """After one call that asks for hidden states or attentions, these hooks stay on the layers and inside of them."""
    leaves, programs = pair(name)
    batch = BY_NAME[name].make_batch("right")
    for model in (leaves, programs):
        if checkpointed:
            model.gradient_checkpointing_enable()
    asked = [model(**batch, output_hidden_states=True, output_attentions=True) for model in (leaves, programs)]
    assert asked[0].hidden_states and all(map(torch.equal, asked[0].hidden_states, asked[1].hidden_states))
    assert calls(programs) == [0, 0]
    assert_same(programs, leaves, batch)
    assert calls(programs) == [1, 1]


def test_weights_that_change_their_dtype_are_written_down_anew() -> None:
    leaves, programs = (model.to(torch.bfloat16) for model in pair("llama"))
    assert_same(programs, leaves, BY_NAME["llama"].make_batch("right"), "bf16")
    assert calls(programs) == [1, 1]


def test_a_child_that_was_exchanged_is_written_down_anew() -> None:
    leaves, programs = pair("llama")
    batches = [exchanged(model, BY_NAME["llama"].make_batch()) for model in (leaves, programs)]
    (loss, grads), (expected, wanted) = step(programs, batches[1]), step(leaves, batches[0])
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    assert calls(programs) == [1, 1]


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_a_parametrised_weight_sends_its_layer_alone() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    assert_same(programs, leaves, batch)
    for model in (leaves, programs):
        nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.up_proj, "weight", Twice())
    assert_same(programs, leaves, batch)
    assert calls(programs) == [1, 2]


def test_no_grad_goes_leaf_by_leaf() -> None:
    leaves, programs = pair("llama")
    batch = BY_NAME["llama"].make_batch("right")
    with torch.no_grad():
        assert torch.equal(programs(**batch).logits, leaves(**batch).logits)
    assert calls(programs) == [0, 0]


def test_adapters_that_come_later_go_leaf_by_leaf() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False)
    models = []
    for options in (LEAVES, PROGRAMS):
        torch.manual_seed(0)
        models.append(peft.get_peft_model(patch_model(BY_NAME["llama"].build(), options), config))
    assert_same(models[1], models[0], BY_NAME["llama"].make_batch("right"))


REFUSED = {
    "tempo": "it keeps something in a way that programs do not know",
    "fewbit": "mlp.act_fn is patched in a way that programs do not know (activation)",
}


@pytest.mark.parametrize("preset", REFUSED)
def test_other_presets_go_leaf_by_leaf_and_the_report_says_why(preset: str) -> None:
    options = {"programs": True, "mlp": "int8" if preset == "fewbit" else "identity"}
    model = patch_model(BY_NAME["llama"].build(), CompressionConfig.from_preset(preset, **options))
    notes = {row.note for row in patch_report(model).rows if row.role == "layer"}
    assert notes == {f"{REFUSED[preset]}; it runs module by module"}


def test_the_report_names_programs_and_layers_without() -> None:
    rows = [row for row in patch_report(pair("llama")[1]).rows if row.role == "layer"]
    assert [row.kind for row in rows] == ["program", "program"]
    bloom = BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=64))
    patch_model(bloom, replace(PROGRAMS, engine="programs"))
    (row,) = [row for row in patch_report(bloom).rows if row.role == "layer"]
    assert row.kind == "module by module" and row.note.endswith("it runs module by module")


def test_the_report_says_which_calls_went_leaf_by_leaf() -> None:
    model, batch = pair("llama")[1], BY_NAME["llama"].make_batch("right")
    model(**batch).loss.backward()
    assert "module by module" not in str(patch_report(model))
    model(**batch, unknown=3).loss.backward()
    with torch.no_grad():
        model(**batch, unknown=3)
    (note,) = {row.note for row in patch_report(model).rows if row.role == "layer"}
    assert note == "1 of 2 calls ran module by module; of the last one, it is called with unknown"


class ScaledLayer(type(BY_NAME["llama"].build().model.layers[0])):  # type: ignore[misc]
    """Computes something else for up to 100 tokens than for more. Only a trial run can find that out."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        y: Tensor = super().forward(hidden_states, **kwargs)
        return y if hidden_states.size(1) > 100 else y + 0.125 * hidden_states


def test_a_layer_that_does_something_else_is_not_proved() -> None:
    model = BY_NAME["llama"].build()
    for layer in model.model.layers:
        layer.__class__ = ScaledLayer
    expected = step(model, BY_NAME["llama"].make_batch())
    patch_model(model, replace(PROGRAMS, engine="programs"))
    (row, *_) = [row for row in patch_report(model).rows if row.role == "layer"]
    assert row.kind == "module by module" and "found by a numeric probe" in row.note
    assert torch.equal(step(model, BY_NAME["llama"].make_batch())[0], expected[0])


def test_a_model_patched_before_it_is_trained() -> None:
    """`from_pretrained` returns a model in eval mode. Later changes of the mode do not matter either."""
    stock = BY_NAME["bert"].build(torch.float32).eval()
    programs, leaves = (patch_model(copy.deepcopy(stock), config).train() for config in (PROGRAMS, LEAVES))
    assert {row.kind for row in patch_report(programs).rows if row.role == "layer"} == {"program"}
    batch = BY_NAME["bert"].make_batch()
    (loss, grads), (expected, wanted) = step(programs, batch), step(leaves, batch)
    assert set(calls(programs)) == {1}
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], x) for name, x in wanted.items())
    # the program is written for training: in eval mode, where dropout is off, the layer runs module by module
    programs.eval()
    step(programs, batch)
    assert set(calls(programs)) == {1}


@pytest.mark.parametrize(("name", "as_programs"), [("llama", False), ("gpt2-gelu-new", True)])
def test_an_input_in_the_order_of_channels_gives_stocks_values(name: str, as_programs: bool) -> None:
    """A convolution makes such an input. Llama's norm keeps its memory order, in which products round differently."""
    family = BY_NAME[name]
    stock, patched = family.build().train(), patch_model(family.build().train())
    batch = family.make_batch()
    # an odd length, for which products of the two orders differ
    ids = batch["input_ids"][:, :5]
    embeds = stock.get_input_embeddings()(ids).detach().transpose(1, 2).contiguous().transpose(1, 2)
    outputs = [model(inputs_embeds=embeds, use_cache=False).logits for model in (stock, patched)]
    assert torch.equal(*outputs)
    assert (calls(patched)[0] > 0) == as_programs
