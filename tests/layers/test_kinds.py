"""Layers of one kind share plans, however they differ in what their code does not look at."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import patch_model
from hf_actcompress.layers.noted import Data, Number, class_with
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, step
from tests.layers.plans import PLANS, assert_same, by_plans, plans_of

LAYERS = 4


def plans_in(model: nn.Module) -> int:
    """How many plans the layers of a model have, each counted once."""
    return len({id(known) for plans in plans_of(model) for known in plans.known()})


def test_layers_that_differ_in_an_index_share_a_plan() -> None:
    ours = patch_model(BY_NAME["llama"].build(num_hidden_layers=LAYERS, use_cache=True), PLANS)
    step(ours, BY_NAME["llama"].make_batch())
    assert plans_in(ours) == 1
    (kind,) = plans_of(ours)[0].store._kinds.values()
    assert not kind.branched


@pytest.mark.parametrize("patch_first", [False, True])
def test_layers_with_adapters_share_a_plan(patch_first: bool) -> None:
    """PEFT stores in each adapter the name of the layer that it adapts."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    model = BY_NAME["llama"].build(num_hidden_layers=LAYERS)
    ours = peft.get_peft_model(patch_model(model, PLANS) if patch_first else model, config)  # type: ignore[arg-type]
    step(ours if patch_first else patch_model(ours, PLANS), BY_NAME["llama"].make_batch())
    # the input of the first layer has no gradient
    assert plans_in(ours) == 2


def test_layers_share_a_plan_whatever_their_codecs() -> None:
    """Each keeps what it keeps through its own codec: half of the layers make half of the difference."""
    fields = ("mlp", "linear", "norm", "attention")
    in_4_bits = {"int8": range(0), "half": range(2, LAYERS), "int4": range(LAYERS)}
    stock, batch = BY_NAME["llama"].build(num_hidden_layers=LAYERS), BY_NAME["llama"].make_batch()
    kept, grads = {}, {}
    for name, layers in in_4_bits.items():
        overrides = tuple((f"layers.{i}", field, "int4") for i in layers for field in fields)
        ours = patch_model(copy.deepcopy(stock), replace(by_plans("int8"), overrides=overrides))
        grads[name] = step(ours, batch)[1]
        kept[name] = kept_bytes(lambda model=ours: model(**batch), "cpu")  # type: ignore[misc]
        assert plans_in(ours) == 1
    assert 2 * kept["half"] == kept["int8"] + kept["int4"] < 2 * kept["int8"]
    # the last layer's gradients come from what it keeps alone
    last = [name for name in grads["half"] if "layers.3" in name]
    assert last and all(torch.equal(grads["half"][name], grads["int4"][name]) for name in last)
    assert any(not torch.equal(grads["half"][name], grads["int8"][name]) for name in last)


class _State:
    """What FSDP stores in each layer that it shards."""

    def __init__(self, layer: nn.Module) -> None:
        self.parameters = list(layer.parameters())


def test_layers_with_a_state_of_their_own_share_a_plan() -> None:
    ours: Any = patch_model(BY_NAME["llama"].build(num_hidden_layers=LAYERS), PLANS)
    for layer in ours.model.layers:
        vars(layer)["state"] = {nn.Module: _State(layer)}
    step(ours, BY_NAME["llama"].make_batch())
    # the first layer was alone when its plan was made
    assert plans_in(ours) <= 2


def test_an_attribute_that_some_layers_lack() -> None:
    stock: Any = BY_NAME["llama"].build(num_hidden_layers=LAYERS)
    for i in (1, 3):
        vars(stock.model.layers[i])["about"] = {"name": f"layer {i}"}
    ours: Any = patch_model(copy.deepcopy(stock), PLANS)
    assert_same(stock, ours, BY_NAME["llama"].make_batch())
    assert all(plans.calls == 1 for plans in plans_of(ours))


def test_an_attribute_that_changes_in_every_step_makes_no_plans() -> None:
    ours: Any = patch_model(BY_NAME["llama"].build(num_hidden_layers=LAYERS), PLANS)
    store = plans_of(ours)[0].store
    sizes = []
    for count in range(6):
        for layer in ours.model.layers:
            vars(layer)["about"] = [count]
        step(ours, BY_NAME["llama"].make_batch())
        sizes.append((plans_in(ours), sum(map(len, next(iter(store._values.values())).values()))))
    assert sizes[2:] == sizes[2:3] * 4 and sizes[2][0] <= 3


class _Activation(nn.Module):
    """Reads one of its attributes, and not the other."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.kind, self.about = kind, {"name": f"layer {number}"}

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) if self.kind == "relu" else torch.tanh(x)


def test_each_value_that_code_reads_has_a_plan() -> None:
    stock: Any = BY_NAME["llama"].build(num_hidden_layers=LAYERS)
    for i, layer in enumerate(stock.model.layers):
        layer.mlp.act_fn = _Activation("relu" if i in (0, 3) else "tanh", i)
    ours: Any = patch_model(copy.deepcopy(stock), PLANS)
    assert_same(stock, ours, BY_NAME["llama"].make_batch())
    assert plans_in(ours) == 2
    # a value that no layer had when the first plan was made
    for model in (stock, ours):
        model.model.layers[1].mlp.act_fn.kind = "relu"
        model.model.layers[2].mlp.act_fn.about["name"] = "another"
    assert_same(stock, ours, BY_NAME["llama"].make_batch())


def test_a_string_of_a_module_of_torch() -> None:
    """What a patched activation computes with is read by torch's own code, too: after `patch_model`, in one layer."""
    stock: Any = BY_NAME["llama"].build(num_hidden_layers=LAYERS)
    for layer in stock.model.layers:
        layer.mlp.act_fn = nn.GELU()
    ours: Any = patch_model(copy.deepcopy(stock), PLANS)
    for change in ("none", "tanh", "none"):
        for model in (stock, ours):
            model.model.layers[2].mlp.act_fn.approximate = change
        assert_same(stock, ours, BY_NAME["llama"].make_batch())


def test_a_number_notes_who_looks_at_it() -> None:
    handed, compared = Number(3), Number(3)
    assert compared == 3
    assert compared.used
    assert not handed.used


class _Subclassed(nn.Module):
    """Changes the forward of its subclasses, as a class of transformers does."""

    def __init_subclass__(cls) -> None:
        cls.forward = lambda self, x: -x  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_an_attribute_notes_who_reads_it() -> None:
    module = _Subclassed()
    module.read, module.left = "a", ["b"]  # type: ignore[assignment]
    read, left = Data("read"), Data("left")
    module.__class__ = class_with(_Subclassed, [read, left])
    assert module.read == "a"
    assert (read.used, left.used) == (True, False)
    assert module(torch.ones(())) == 1
