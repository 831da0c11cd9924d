"""Modules outside of layers run by plans, too: embeddings, poolers, a head's transform, heads of the user's own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import FSMTForConditionalGeneration

from hf_actcompress import CompressionConfig, patch_model, patch_report, unpatch_model
from hf_actcompress.layers import outside_of, units_of
from hf_actcompress.modules.base import settings_of
from hf_actcompress.roles import Role
from tests.families import BY_NAME
from tests.layers.plans import (
    DTYPES,
    LEAVES,
    MODES,
    PLANS,
    assert_same,
    by_plans,
    kept_bytes,
    pair,
    plans_of,
)
from tests.oracle import assert_equal_bits
from tests.oracle import kept_bytes as kept_by
from tests.sweep.configs import tiny_config

FOUND = {
    "bert": ["bert.embeddings", "cls.predictions.transform"],
    "modernbert": ["model.embeddings", "head"],
    "vit": ["vit.embeddings"],
    "roberta": ["roberta.embeddings"],
    "llama": [],
}


def names_outside(model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in outside_of(model, units_of(model))]


class WithHead(nn.Module):
    """A model of a user: one of transformers, and a head behind it."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 3))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids=input_ids).last_hidden_state).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FOUND)
def test_which_they_are(name: str) -> None:
    model = patch_model(BY_NAME[name].build(), PLANS)
    # a second look finds the same, as where adapters come later
    assert names_outside(model) == FOUND[name]
    roles = [row.name for row in patch_report(model).patched if row.role == Role.MODULE]
    assert roles == FOUND[name]
    unpatch_model(model)
    assert plans_of(model, Role.MODULE) == []


def test_blocks_that_transformers_does_not_checkpoint() -> None:
    """FSMT's layers stand in lists and are of no class of transformers'. The encoder around them is none to patch."""
    config = tiny_config("fsmt")
    model = FSMTForConditionalGeneration(config)
    before = units_of(model)
    patch_model(model, PLANS)
    assert units_of(model) == before and len(before) == 4
    assert names_outside(model) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if found])
def test_the_same_bits_and_no_more_bytes(name: str, mode: str) -> None:
    stock, plans = pair(name, DTYPES[mode])
    batch = BY_NAME[name].make_batch()
    assert_same(plans, stock, batch, mode)
    assert [(found.calls, found.why) for found in plans_of(plans, Role.MODULE)] == [(1, "")] * len(FOUND[name])
    assert kept_bytes(plans, batch) <= kept_bytes(patch_model(copy.deepcopy(stock), LEAVES), batch)


class Places(nn.Module):
    """Embeddings of 8 levels of a tree, for each token a tag and a number at each (MarkupLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.numbers = (nn.ModuleList(nn.Embedding(9, 8) for _ in range(8)) for _ in range(2))
        self.inner, self.out = nn.Linear(64, 16), nn.Linear(16, 64)

    def forward(self, places: Tensor) -> Tensor:
        tags, numbers = (
            torch.cat([part(x) for part, x in zip(parts, places.unbind(-1), strict=True)], -1)
            for parts in (self.tags, self.numbers)
        )
        return self.out(torch.relu(self.inner(tags + numbers)))  # type: ignore[no-any-return]


def test_of_embeddings_that_are_added_the_sum_is_kept() -> None:
    """And not each of them, which are more."""
    torch.manual_seed(0)
    stock = WithHead(BY_NAME["bert"].build().bert, 64)
    stock.body, stock.head = Places(), nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 3))
    ours = patch_model(copy.deepcopy(stock), PLANS)
    places = torch.randint(0, 9, (2, 24, 8))

    def step(model: Any) -> Tensor:
        return model.head(model.body(places)).square().mean()  # type: ignore[no-any-return]

    grads = [torch.autograd.grad(step(x), [*x.parameters()]) for x in (ours, stock)]
    assert_equal_bits(*grads)
    assert settings_of(ours.body).plans.calls == 1  # type: ignore[union-attr]
    assert kept_by(lambda: step(ours)) <= 0.75 * kept_by(lambda: step(stock))


def test_a_head_of_the_user() -> None:
    torch.manual_seed(0)
    body = BY_NAME["bert"].build().bert
    stock = WithHead(body, body.config.hidden_size).train()
    ours = patch_model(copy.deepcopy(stock))
    batch = {"input_ids": BY_NAME["bert"].make_batch()["input_ids"]}
    grads = [torch.autograd.grad(x(**batch), [*x.parameters()], allow_unused=True) for x in (ours, stock)]
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert settings_of(ours.head).plans.calls == 1  # type: ignore[union-attr]


def test_a_frozen_one_runs_as_it_is() -> None:
    stock, ours = pair("bert")
    for model in (stock, ours):
        model.bert.embeddings.requires_grad_(requires_grad=False)
    assert_same(ours, stock, BY_NAME["bert"].make_batch())
    embeddings = settings_of(ours.bert.embeddings).plans
    # nothing is traced for it, and there is nothing to report
    assert (embeddings.calls, embeddings.leaf_calls, embeddings.known()) == (0, 0, [])


def test_a_hook_on_the_embedding() -> None:
    stock, ours = pair("bert")
    for model in (stock, ours):
        model.enable_input_require_grads()
    assert_same(ours, stock, BY_NAME["bert"].make_batch())
    embeddings, transform = plans_of(ours, Role.MODULE)
    assert "hooks" in embeddings.why and transform.calls == 1


def test_padding_is_left_out() -> None:
    """Embeddings are given indices [B, S], by which their rows are known."""
    model, batch = BY_NAME["modernbert"].build(), BY_NAME["modernbert"].make_batch("right")
    leaves, ours = (patch_model(copy.deepcopy(model), replace(x, drop_padding=True)) for x in (LEAVES, PLANS))
    assert_same(ours, model, batch)
    assert [(found.calls, found.why) for found in plans_of(ours, Role.MODULE)] == [(1, "")] * 2
    assert kept_bytes(ours, batch) <= kept_bytes(leaves, batch)


def test_what_a_norm_reads_of_an_activation_is_not_kept_again() -> None:
    """An activation's input goes through a codec. The norm behind it reads what is made of that."""
    model, batch = BY_NAME["modernbert"].build(), BY_NAME["modernbert"].make_batch()
    ours = patch_model(model, by_plans("int8"))
    kept_bytes(ours, batch)
    (known,) = settings_of(ours.head).plans.known()
    made = [node.name for node in known.plan.halves.kept if node.target is not torch.ops.aten.mm.default]
    assert "gelu" not in made and len(known.plan.packed) == 2


class First(nn.Module):
    """Reads the first token of each sequence, as a pooler does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense, self.activation = nn.Linear(width, width), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x[:, 0]))  # type: ignore[no-any-return]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.pool = nn.Linear(16, 16), First(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.make(x)).square().sum()  # type: ignore[no-any-return]


def test_of_the_first_tokens_a_copy_is_kept() -> None:
    torch.manual_seed(0)
    stock = Pooled().train()
    ours = patch_model(copy.deepcopy(stock))
    for length in (64, 48):
        x = torch.randn(3, length, 16)
        grads = [torch.autograd.grad(model(x), [*model.parameters()]) for model in (ours, stock)]
        assert all(map(torch.equal, *grads))
        # what the product reads, the activation's output, and what the square reads are a row for each sequence
        assert kept_by(lambda x=x: ours(x)) <= 3 * 3 * 16 * 4 < x.nbytes  # type: ignore[misc]
    assert plans_of(ours, Role.MODULE)[0].calls == 4


def test_they_are_not_compiled() -> None:
    ours: Any = patch_model(BY_NAME["bert"].build(), CompressionConfig(compile=True))
    assert [settings_of(x).compile for x in (ours.bert.embeddings, ours.bert.encoder.layer[0])] == [False, True]


class Cut(nn.Module):
    """A block that cuts what it has made in parts, of which backward needs one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.down = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.linear(x).chunk(3, dim=-1)
        return x + self.down(nn.functional.silu(a)) + b + c


@pytest.mark.parametrize(("preset", "bytes_of_both"), [("exact", 2.0), ("int8", 0.54)])
def test_of_what_a_layer_has_made_the_part_that_backward_reads_is_kept(preset: str, bytes_of_both: float) -> None:
    """Stock keeps all three parts for one: the part is a view of all of them."""
    torch.manual_seed(0)
    stock, x = nn.Sequential(Cut(), Cut()), torch.randn(4, 64, 64)
    ours = patch_model(copy.deepcopy(stock), preset)
    grads = []
    for model in (stock, ours):
        model(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    if preset == "exact":
        assert_equal_bits(*grads)
    assert [plan.leaf_calls for plan in plans_of(ours)] == [0, 0]
    one, two = (kept_by(lambda model=model: model(x)) for model in (ours[:1], ours))
    # of the second block its input, and a part as large
    assert two - one <= bytes_of_both * x.nbytes


@pytest.mark.parametrize("tokens", [1, 16])
def test_of_a_few_tokens_a_linear_layer_keeps_a_copy(tokens: int) -> None:
    """As ViT's classifier reads the first one."""
    torch.manual_seed(0)
    stock = nn.Linear(32, 32)
    ours, x = patch_model(copy.deepcopy(stock)), torch.randn(4, 16, 32)

    def loss(model: nn.Module) -> Tensor:
        # the product is read by no one else
        return model((x * 2)[:, :tokens]).sum()

    for model in (stock, ours):
        loss(model).backward()
    assert_equal_bits([p.grad for p in ours.parameters()], [p.grad for p in stock.parameters()])
    kept = [kept_by(lambda model=model: loss(model)) for model in (stock, ours)]
    assert kept[1] == x[:, :tokens].nbytes <= kept[0]
