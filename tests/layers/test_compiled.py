"""Plans that a compiler makes code of.

The graphs that Inductor would get run op by op here, without its decompositions: what is around its code is right if
they have stock's bits. `test_compiled_by_inductor.py` runs Inductor.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from hf_actcompress import CompressionConfig, PatchReport, estimate, patch_model, patch_report
from hf_actcompress.compiling import traced_for_compiler
from hf_actcompress.config import PRESETS
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.graphs import compiled, segments
from hf_actcompress.modules.base import settings_of
from hf_actcompress.private_apis.graphs import any_sizes
from tests.families import BY_NAME, FAMILIES, step
from tests.layers.plans import (
    DTYPES,
    PLANS,
    assert_compiled,
    assert_same,
    assert_stock_bits,
    by_plans,
    kept_bytes,
    plans_of,
)
from tests.models.test_packed import packed, rows

COMPILED = replace(PLANS, compile=True)
WAYS = [
    ("fp32", "none", False), ("bf16", "left", False), ("autocast", "right", False), ("fp32", "none", True),
    ("autocast", "right", True),
]  # fmt: skip


class Compiler:
    """Takes the place of Inductor.

    Attributes:
        backwards: For each graph that it was given, whether it is a backward.
        fails: Whether it raises.
    """

    def __init__(self) -> None:
        self.backwards: list[bool] = []
        self.fails = False

    def code(self, graph: GraphModule, mode: Any, *, backward: bool) -> Callable[[list[Any]], Any]:
        if self.fails:
            raise RuntimeError("no compiler here")
        self.backwards.append(backward)

        def run(given: list[Any]) -> Any:
            arguments = list(given)
            given.clear()
            return [_no_view(y) for y in graph(*arguments)]

        return run


def _no_view(y: Any) -> Any:
    """The same memory as a tensor that is no view, as Inductor returns it."""
    if not isinstance(y, Tensor) or not y._is_view():
        return y
    return torch.empty(0, dtype=y.dtype).set_(y.untyped_storage(), y.storage_offset(), y.shape, y.stride())


def as_they_are(function: Any, values: Any) -> GraphModule:
    """The graph of a function, without decompositions."""
    mode = next(x.fake_mode for x in values if isinstance(x, Tensor))
    with traced_for_compiler(), any_sizes(), mode, torch.no_grad():
        return make_fx(functionalize(function))(*values)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """Graphs run op by op."""
    found = Compiler()
    monkeypatch.setattr(compiled, "functional", as_they_are)
    monkeypatch.setattr(compiled, "inductor_code", found.code)
    compiled._say_once.cache_clear()
    yield found


@pytest.mark.daily(20)
@pytest.mark.parametrize(("mode", "padding", "checkpointed"), WAYS)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family(name: str, mode: str, padding: str, checkpointed: bool, compiler: Compiler) -> None:
    family = BY_NAME[name]
    model = family.build(DTYPES[mode])
    if checkpointed:
        model.gradient_checkpointing_enable()
    batch = family.make_batch(padding if padding in family.paddings else "none")
    assert_compiled(assert_stock_bits(model, batch, mode, COMPILED))


@pytest.mark.daily(4)
@pytest.mark.parametrize("preset", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2-gelu-new", "qwen3"])
def test_codecs_pack_in_the_graph(name: str, preset: str, compiler: Compiler) -> None:
    """Gradients and kept bytes are those of the preset without a compiler, also from the second sizes on."""
    family = BY_NAME[name]
    model = family.build()
    ours = patch_model(copy.deepcopy(model), replace(by_plans(preset), compile=True))
    plain = patch_model(copy.deepcopy(model), by_plans(preset))
    for batch, length in ((2, 24), (3, 40), (5, 33)):
        ids = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))
        assert_same(ours, plain, {"input_ids": ids, "labels": ids})
    assert_compiled(ours)
    # a forward and a backward for one size and for any sizes, whatever the number of layers
    assert sorted(compiler.backwards) == [False, False, True, True]
    kept = [kept_bytes(one, {"input_ids": ids, "labels": ids}) for one in (ours, plain)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_adapters_accumulate(name: str, compiler: Compiler) -> None:
    model = get_peft_model(
        BY_NAME[name].build(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    ).train()
    ours, batch = patch_model(copy.deepcopy(model), COMPILED), BY_NAME[name].make_batch()
    for one in (model, ours):
        for _ in range(2):
            one(**batch).loss.backward()
    found = dict(ours.named_parameters())
    assert not [n for n, p in model.named_parameters() if p.requires_grad and not torch.equal(p.grad, found[n].grad)]
    assert_compiled(ours)


def test_outputs_without_a_gradient(compiler: Compiler) -> None:
    """A loss on the keys in a cache, twice: the backward of the first layer has no gradient of its output."""
    model, batch = BY_NAME["llama"].build(use_cache=True), BY_NAME["llama"].make_batch()
    del batch["labels"]
    found = []
    for one in (model, patch_model(copy.deepcopy(model), COMPILED)):
        loss = sum(layer.keys.square().mean() for layer in one(**batch).past_key_values.layers)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({n: p.grad for n, p in one.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert not [n for n, grad in found[0].items() if not torch.equal(grad, found[1][n])]


class Exponential(nn.Module):
    """A block that returns a view of what its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x)).transpose(1, 2)


@pytest.mark.parametrize("compile", [False, True])
def test_writes_on_an_output_are_seen(compile: bool, compiler: Compiler) -> None:
    """Whoever writes into what a block returned, and what its backward needs, gets torch's error."""
    blocks = patch_model(nn.ModuleList([Exponential(), Exponential()]), replace(PLANS, compile=compile))
    y = blocks[0](torch.ones(2, 8, 8))
    assert plans_of(blocks)[0].calls == 1
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Biases(nn.Module):
    """A block whose last two biases have the same gradient, in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.bias


def test_gradients_share_no_memory(compiler: Compiler) -> None:
    """Autograd keeps a gradient as `grad` without a copy, and adds to it in place later."""
    blocks = patch_model(nn.ModuleList([Biases(), Biases()]), COMPILED)
    for _ in range(2):
        blocks[0](torch.ones(4, 8)).sum().backward()
    assert_compiled(blocks[:1])
    assert torch.equal(blocks[0].linear.bias.grad, torch.full((8,), 8.0))
    assert torch.equal(blocks[0].bias.grad, torch.full((1, 8), 8.0))


def test_left_out_rows(compiler: Compiler) -> None:
    """Rows of padding are not kept; what packs them runs behind the compiled forward."""
    config = CompressionConfig(loss_head=False, drop_padding=True)
    family = BY_NAME["llama"]
    models = [patch_model(family.build(), replace(config, compile=which)) for which in (True, False)]
    batch = family.make_batch("right")
    assert_same(*models, batch)
    assert_compiled(models[0])
    assert kept_bytes(models[0], batch) == kept_bytes(models[1], batch)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_segments_around_attention_that_no_compiler_sees(checkpointed: bool, compiler: Compiler) -> None:
    """Packed rows: what is before our attention and what is behind it are compiled apart, once for both layers."""
    model, batch = BY_NAME["qwen3"].build(), packed(rows())
    if checkpointed:
        model.gradient_checkpointing_enable()
    ours, plain = (patch_model(copy.deepcopy(model), config) for config in (COMPILED, PLANS))
    assert_same(ours, plain, batch)
    assert_compiled(ours)
    assert compiler.backwards == [False, False, True, True] + [True] * checkpointed
    assert kept_bytes(ours, batch) == kept_bytes(plain, batch)


@pytest.mark.parametrize("why", ["the compiler", "the trace"])
def test_what_cannot_be_compiled_runs_as_it_is(
    why: str, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.fails = why == "the compiler"
    family = BY_NAME["llama"]
    model = family.build(hidden_act="silu")
    if why == "the trace":
        monkeypatch.setattr(compiled, "functional", _refuse)
    with caplog.at_level(logging.WARNING):
        ours = assert_stock_bits(model, family.make_batch(), config=COMPILED)
        step(ours, family.make_batch())
    said = [record.message for record in caplog.records if "not compiled" in record.message]
    assert len(said) == 1
    assert ("no compiler here" if compiler.fails else "no trace here") in said[0]
    report: PatchReport = patch_report(ours)
    assert any("not compiled" in row.note for row in report.rows)


def _refuse(*args: Any) -> None:
    raise ValueError("no trace here")


def test_config() -> None:
    model = patch_model(BY_NAME["llama"].build(), compile=True)
    assert settings_of(model.model.layers[0]).compile
    assert not settings_of(patch_model(model).model.layers[0]).compile
    with pytest.raises(UnknownOptionError, match="with compile, plans"):
        CompressionConfig(plans=False, compile=True)


def test_estimates_run_no_compiler(compiler: Compiler) -> None:
    model = BY_NAME["llama"].build()
    configs = [replace(PRESETS["exact"], compile=which) for which in (True, False)]
    found = [estimate(model, config=config, batch_size=2, seq_len=16) for config in configs]
    assert found[0].kept_bytes == found[1].kept_bytes
    assert compiler.backwards == []


def test_items_stay_with_what_they_are_taken_from() -> None:
    """A segment returns tensors and no tuples, so a tuple's items are in the segment that makes it."""
    graph = Graph()
    x = graph.placeholder("x")
    both = graph.call_function(torch.ops.aten.var_mean.default, (x,))
    other = graph.call_function(torch.ops.aten.relu.default, (x,))
    items = [graph.call_function(operator.getitem, (both, i)) for i in (1, 0)]
    assert segments._with_items([both, other, *items]) == [both, *items, other]
