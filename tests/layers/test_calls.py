"""What a call of a layer by plans is given, keeps and returns."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import patch_model, unpatch_model
from hf_actcompress.graphs.backward import BackwardCode
from hf_actcompress.graphs.plan import LayerPlan
from hf_actcompress.layers import show, stages
from hf_actcompress.modules.base import settings_of
from tests.families import BY_NAME, differing, mode_of, step
from tests.layers.plans import PLANS, assert_all_ran, assert_stock_bits, by_plans, plans_of
from tests.oracle import kept_bytes

FLOOR = {
    ("llama", "bf16"): 23.5, ("bert", "bf16"): 20.5, ("gpt2-gelu-new", "bf16"): 20.5,
    ("llama", "autocast"): 25.5, ("gpt2-gelu-new", "autocast"): 22.6,
}  # fmt: skip


def store_of(model: nn.Module) -> Any:
    return plans_of(model)[0].store


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2-gelu-new"])
def test_a_cache_is_filled(name: str) -> None:
    model, batch = BY_NAME[name].build(use_cache=True), BY_NAME[name].make_batch()
    ours = assert_stock_bits(model, batch)
    for stock, found in zip(model(**batch).past_key_values.layers, ours(**batch).past_key_values.layers, strict=True):
        assert torch.equal(stock.keys, found.keys)
        assert torch.equal(stock.values, found.values)


def test_no_gradient_stays_none() -> None:
    """A loss on the keys in a cache: what they are not made of has no gradient, in a first and in a second backward."""
    model, batch = BY_NAME["llama"].build(use_cache=True), BY_NAME["llama"].make_batch()
    del batch["labels"]
    ours = patch_model(copy.deepcopy(model), PLANS)
    found = []
    for one in (model, ours):
        loss = sum(layer.keys.square().mean() for layer in one(**batch).past_key_values.layers)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    assert not differing(*found)
    assert_all_ran(ours)


@pytest.mark.parametrize("change", ["eval", "dropout", "freeze"])
def test_a_change_before_backward_changes_nothing(change: str) -> None:
    """Backward reads nothing from a module."""
    model, batch = BY_NAME["bert"].build(dropout=0.1), BY_NAME["bert"].make_batch()
    ours = patch_model(copy.deepcopy(model), PLANS)
    _, expected = step(model, batch)
    torch.manual_seed(7)
    loss = ours(**batch).loss
    if change == "eval":
        ours.eval()
    for module in ours.modules() if change == "dropout" else ():
        if isinstance(module, nn.Dropout):
            module.p = 0.9
    if change == "freeze":
        ours.bert.encoder.requires_grad_(False)
    loss.backward()
    ours.bert.encoder.requires_grad_(True)
    found = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    assert not [n for n, x in found.items() if not torch.equal(x, expected[n])]
    assert_all_ran(ours)


def test_another_state_is_another_plan() -> None:
    model, batch = BY_NAME["bert"].build(dropout=0.1), BY_NAME["bert"].make_batch()
    ours = patch_model(copy.deepcopy(model), PLANS)
    for train in (True, False, True):
        model.train(train), ours.train(train)
        assert not differing(step(model, batch)[1], step(ours, batch)[1])
    assert_all_ran(ours)
    assert len(plans_of(ours)[0]._states) == 2


def test_hooks_inside_run_leaf_by_leaf() -> None:
    ours, batch = patch_model(BY_NAME["llama"].build(), PLANS), BY_NAME["llama"].make_batch()
    seen: list[Any] = []
    ours.model.layers[0].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    step(ours, batch)
    assert seen
    first, second = plans_of(ours)
    assert "hooks" in first.why
    assert (first.calls, second.calls) == (0, 1)


@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_codecs_are_those_of_the_layers(preset: str) -> None:
    """Two layers of one kind share a plan, and each keeps through its own codec."""
    model, batch = BY_NAME["llama"].build(), BY_NAME["llama"].make_batch()
    ours, other = (patch_model(copy.deepcopy(model), by_plans(name)) for name in (preset, "exact"))
    (loss, lossy), (exact_loss, exact) = step(ours, batch), step(other, batch)
    assert torch.equal(loss, exact_loss)
    assert_all_ran(ours)
    errors = [float((lossy[n] - x).norm() / x.norm()) for n, x in exact.items()]
    assert 0 < max(errors) < (0.05 if preset == "int8" else 0.5)
    (known,) = plans_of(ours)[0].known()
    assert isinstance(known.plan, LayerPlan)
    for layer in ours.model.layers:
        for packed in known.plan.packed:
            settings = settings_of(layer.get_submodule(packed.mark.module))
            assert settings is not None
            assert packed.codec_in(layer) == settings.codec
    assert {packed.mark.part for packed in known.plan.packed} == {"", "q", "k", "v", "output", "gate", "up"}
    assert kept_bytes(lambda: ours(**batch).loss) < kept_bytes(lambda: other(**batch).loss)


def test_copies_and_unpatching() -> None:
    model, batch = BY_NAME["llama"].build(), BY_NAME["llama"].make_batch()
    ours = assert_stock_bits(model, batch)
    twin = copy.deepcopy(ours)
    assert not differing(step(model, batch)[1], step(twin, batch)[1])
    assert_all_ran(twin)
    assert store_of(twin) is not store_of(ours)
    assert not differing(step(model, batch)[1], step(unpatch_model(ours), batch)[1])


@pytest.mark.parametrize(("name", "mode"), FLOOR)
def test_the_floor_of_bytes(name: str, mode: str) -> None:
    """Bytes that a layer keeps per token and unit of the hidden size: the slope over depth."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 67}
    wide = {"llama": {"intermediate_size": 896, "num_key_value_heads": 1}, "bert": {"intermediate_size": 1024}}
    wide["gpt2-gelu-new"] = {"n_inner": 1024, "n_embd": 256, "n_head": 4}
    ids = torch.randint(3, 60, (1, 64), generator=torch.Generator().manual_seed(0))
    kept = []
    for layers in (2, 4):
        options = {"n_layer": layers} if name.startswith("gpt2") else {"num_hidden_layers": layers, **sizes}
        model = BY_NAME[name].build(torch.float32 if mode == "autocast" else torch.bfloat16, **options, **wide[name])
        ours = patch_model(model, PLANS)

        def loss(ours: Any = ours) -> Any:
            with mode_of(mode):
                return ours(input_ids=ids, labels=ids).loss

        loss().backward()
        kept.append(kept_bytes(loss))
        assert_all_ran(ours)
    assert (kept[1] - kept[0]) / 2 / 64 / 256 <= FLOOR[name, mode]


def test_zeros_and_parts_of_gradients() -> None:
    """A plan's backward is written for the outputs that have a gradient."""
    ours, batch = patch_model(BY_NAME["llama"].build(use_cache=True), PLANS), BY_NAME["llama"].make_batch()
    step(ours, batch)
    (known,) = plans_of(ours)[0].known()
    plan = known.plan
    assert isinstance(plan, LayerPlan)
    assert isinstance(plan.code, BackwardCode)
    assert plan.outputs == 3
    run, zeros = plan.backward(frozenset({1, 2}), ())
    whole, _ = plan.backward(frozenset(), ())
    assert zeros == ()
    assert len(run.source) < len(whole.source)


def test_show_names_what_crosses() -> None:
    ours = patch_model(BY_NAME["llama"].build(), PLANS)
    assert show(ours.model.layers[0]) == "no call with gradients so far"
    step(ours, BY_NAME["llama"].make_batch())
    text = show(ours.model.layers[0])
    assert "what crosses from forward to backward" in text
    assert re.search(r"mm_4 +made +float32 +\[39, 56\] +for mlp", text)
    with pytest.raises(TypeError, match="LlamaModel"):
        show(ours.model)


@pytest.mark.parametrize("name", ["llama", "t5", "gpt2-gelu-new"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_backward_in_stages(name: str, checkpointed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are added up, autograd does so for some weights before the next gradients are made."""
    monkeypatch.setattr(stages, "SLACK", 0)
    model, batch = BY_NAME[name].build(), BY_NAME[name].make_batch()
    ours, began = patch_model(copy.deepcopy(model), PLANS), []
    begin = stages.Stages.begin
    monkeypatch.setattr(stages.Stages, "begin", lambda self, *args: began.append(self.stops) or begin(self, *args))
    for one in (model, ours):
        if checkpointed:
            one.gradient_checkpointing_enable()
        for _ in range(2):
            one(**batch).loss.backward()
    assert any(began)
    grads = dict(ours.named_parameters())
    assert not [n for n, p in model.named_parameters() if not torch.equal(p.grad, grads[n].grad)]
    assert_all_ran(ours)


def test_an_argument_that_no_layer_looks_at_makes_no_plan() -> None:
    """The Trainer hands the number of items in a batch to the model, which hands it on to its layers."""
    model, batch = BY_NAME["llama"].build(), BY_NAME["llama"].make_batch()
    ours = patch_model(copy.deepcopy(model), PLANS)
    for number in (30, 31, 32):
        found = [one(**batch, num_items_in_batch=number).loss for one in (model, ours)]
        assert torch.equal(*found)
        found[1].backward()
    assert len(plans_of(ours)[0].known()) == 1
    assert_all_ran(ours)


class Halved(nn.Module):
    """A block that returns halves of one tensor: its backward puts the gradients of both together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = self.linear(x).sigmoid().chunk(2, dim=-1)
        return first, second, self.other(x)


@pytest.mark.parametrize("read", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_outputs_that_nobody_differentiates(read: tuple[int, ...]) -> None:
    stock = nn.ModuleList([Halved()])
    ours = patch_model(copy.deepcopy(stock), PLANS)
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for blocks in (stock, ours):
        given = x.clone().requires_grad_()
        outputs = blocks[0](given)
        sum(outputs[i].square().sum() for i in read).backward()
        found.append({**{name: p.grad for name, p in blocks.named_parameters()}, "x": given.grad})
    assert [name for name, grad in found[0].items() if grad is None] == [n for n, g in found[1].items() if g is None]
    assert all(grad is None or torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert_all_ran(ours)
