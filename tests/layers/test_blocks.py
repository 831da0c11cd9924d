"""Blocks of models that are none of transformers': any list of blocks runs by plans without being asked."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_actcompress import PRESETS, CompressionConfig, kept_bytes, patch_model, patch_report, unpatch_model
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.graphs.trace import MOST_CALLS
from hf_actcompress.layers import layer as layers
from hf_actcompress.layers.look import kind_of
from hf_actcompress.models.attention import find_attention
from hf_actcompress.modules.base import PatchedModule, settings_of
from tests.layers.blocks import STACKS, WIDTH, Block, PlainList, Stack
from tests.layers.plans import plans_of
from tests.sweep.configs import tiny_config


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    torch.manual_seed(1)
    loss = model(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters())]


def inputs(length: int = 9) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length)).requires_grad_()


def equal(ours: list[Tensor | None], stock: list[Tensor | None]) -> bool:
    pairs = zip(ours, stock, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", STACKS)
def test_stocks_bits_in_fewer_bytes(name: str) -> None:
    stock = Stack(STACKS[name]()).train()
    ours = patch_model(copy.deepcopy(stock))
    for length in (9, 7, 12):
        assert equal(step(ours, inputs(length)), step(stock, inputs(length)))
        for model in (ours, stock):
            model.zero_grad()
    assert plans_of(ours) and all(plans.calls == 3 and not plans.why for plans in plans_of(ours))
    kept, whole = (kept_bytes(lambda m=m: m(inputs(64)), "cpu") for m in (ours, stock))
    assert kept <= whole * (1.0 if name == "rotating" else 0.85)
    unpatch_model(ours)
    assert not plans_of(ours) and [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]


def test_an_output_that_is_kept_through_its_codec() -> None:
    """An output that a ReLU made is kept through its codec, and is returned as it is."""
    stock = Stack(nn.ModuleList([PlainList(), PlainList()])).train()
    ours = patch_model(copy.deepcopy(stock), "int8")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(ours, inputs()), step(stock, inputs())
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert (a - b).norm() <= 0.1 * b.norm()


def test_attention_in_a_blocks_own_code_has_the_codec_of_its_block() -> None:
    stock = Stack(nn.ModuleList(Block(0.0) for _ in range(4))).train()
    # q, k and v of one block in fp32. Its output goes through the codec of the linear layer that reads it in any case
    heads = 3 * 2 * 64 * WIDTH * 4
    kept = []
    for plain in ((), (0, 2), (0, 1, 2, 3)):
        overrides = tuple((f"blocks.{i}", "attention", "identity") for i in plain)
        model = patch_model(copy.deepcopy(stock), CompressionConfig.from_preset("int8", overrides=overrides))
        kept.append(kept_bytes(lambda m=model: m(inputs(64)), "cpu"))
    # int8 with its scales saves almost three quarters
    for more, less in zip(kept[1:], kept, strict=False):
        assert 2 * 0.7 * heads <= more - less <= 2 * 0.75 * heads


class WithBias(nn.Module):
    """Returns something that nobody reads, and is given a bias whose gradient backward reads once more."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x)
        scores = (q @ x.transpose(1, 2)) / 4 + bias
        return scores.softmax(-1) @ x, scores, q


def test_a_gradient_that_backward_reads_once_more() -> None:
    stock = nn.ModuleList([WithBias()]).train()
    ours = patch_model(copy.deepcopy(stock))
    found: list[list[Any]] = []
    for model in (ours, stock):
        x, bias = inputs(), torch.zeros(2, 9, 9, requires_grad=True)
        model[0](x, bias * 1)[0].square().mean().backward()
        found.append([x.grad, bias.grad, *(p.grad for p in model.parameters())])
    assert found[0][1] is not None and equal(*found)
    assert [plans.calls for plans in plans_of(ours)] == [1]


class Outer(nn.Module):
    """A block of more calls than are traced at once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Block(0.0) for _ in range(2))
        self.calls = MOST_CALLS

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        for _ in range(self.calls):
            x = x + 1e-6
        return x


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The classes of the blocks that are traced."""
    found: list[str] = []

    def learn(layer: Any, *args: Any) -> Any:
        found.append(type(layer).stock_class.__name__)
        return stock(layer, *args)

    stock = layers.learn
    monkeypatch.setattr(layers, "learn", learn)
    yield found


def test_a_block_of_too_many_calls_leaves_it_to_the_blocks_inside(traces: list[str]) -> None:
    stock = Stack(nn.ModuleList([Outer()])).train()
    ours = patch_model(copy.deepcopy(stock))
    assert equal(step(ours, inputs()), step(stock, inputs()))
    outer, *inner = plans_of(ours)
    assert outer.calls == 0 and "calls of torch" in outer.why
    assert [plans.calls for plans in inner] == [1, 1] and traces == ["Outer", "Block"]


def test_a_block_that_has_no_plan_is_not_tried_with_every_length(traces: list[str]) -> None:
    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    stock = Stack(nn.ModuleList([Reading(0.0)])).train()
    ours = patch_model(copy.deepcopy(stock))
    for length in range(3, 9):
        assert equal(step(ours, inputs(length)), step(stock, inputs(length)))
        for model in (ours, stock):
            model.zero_grad()
    assert traces == ["Reading", "Reading"]


class Processor:
    """Holds what a block computes with, as the processors of diffusers' attention do."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.scale


class Processed(Block):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(0.0)
        self.processor = Processor(scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(super().forward(x))


def test_objects_are_alike_by_their_attributes(traces: list[str]) -> None:
    stock = Stack(nn.ModuleList([Processed(), Processed(), Processed(0.5)])).train()
    kinds = [kind_of(block, ()) for block in stock.blocks]  # type: ignore[attr-defined]
    assert kinds[0] == kinds[1] != kinds[2]
    ours = patch_model(copy.deepcopy(stock))
    for scale in (1.0, 3.0):
        for model in (stock, ours):
            model.zero_grad()
            model.blocks[1].processor.scale = scale
        assert equal(step(ours, inputs()), step(stock, inputs()))
    # the first two share a trace until the attribute of one changes
    assert traces == ["Processed"] * 3


def test_layers_of_transformers_run_by_plans_like_blocks() -> None:
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}
    bloom = patch_model(BloomForCausalLM(BloomConfig(**sizes)))
    assert [row.kind for row in patch_report(bloom).rows if row.role == "layer"] == ["plan"]
    leaves = patch_model(BloomForCausalLM(BloomConfig(**sizes)), CompressionConfig(plans=False))
    assert not plans_of(leaves) and not [row for row in patch_report(leaves).rows if row.role == "layer"]


def test_what_no_plan_does_goes_module_by_module() -> None:
    assert not plans_of(patch_model(Stack(nn.ModuleList([Block()])), "fewbit"))
    assert not plans_of(patch_model(Stack(nn.ModuleList([Block()])), "gact"))
    block = Block()
    block.norm2 = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]
    model = patch_model(Stack(nn.ModuleList([block])), "int8")
    assert not plans_of(model)
    (row,) = [row for row in patch_report(model).rows if row.role == "layer"]
    assert row.note == "norm2 has an input that goes through a codec of feature maps; it runs module by module"


def test_code_that_compares_the_name_of_its_attention() -> None:
    """Sparse attention is masked only under the names of stock's functions."""
    from transformers import AXK2ForCausalLM

    torch.manual_seed(0)
    stock = AXK2ForCausalLM(tiny_config("axk2", dropout=0.0)).train()
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    ours = patch_model(copy.deepcopy(stock), CompressionConfig())
    ids = torch.randint(3, 60, (2, 13))
    expected = stock(input_ids=ids).logits
    assert torch.equal(ours(input_ids=ids).logits, expected)
    stock.gradient_checkpointing_disable()
    compiled = patch_model(copy.deepcopy(stock))
    compiled.compile(backend="eager")
    torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-6)
    compared = next(m for m in stock.modules() if type(m).__name__ == "AXK2Attention")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "vocab_size": 9}
    looked_up = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).model.layers[0].self_attn
    names = [find_attention(m, PRESETS["exact"]).settings.renamed for m in (compared, looked_up)]  # type: ignore
    assert names[0] is None and names[1] is not None
    assert settings_of(compared) is None


class Named(nn.Module):
    """Two different blocks in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stack = Block(0.0), nn.ModuleList([Block(0.0), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.first, *self.stack):
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("blocks", [(Block,), ("Block",), ("first", "stack")])
def test_blocks_that_the_config_names(blocks: tuple[Any, ...]) -> None:
    stock = Named().train()
    config = CompressionConfig(blocks=blocks)
    assert CompressionConfig.from_json(config.to_json()) == config
    ours = patch_model(copy.deepcopy(stock), config)
    assert equal(step(ours, inputs()), step(stock, inputs()))
    assert isinstance(ours.first, PatchedModule) and plans_of(ours)[0].calls == 1
    assert len(plans_of(ours)) == 2 and not any(plans.why for plans in plans_of(ours))
    assert not plans_of(patch_model(copy.deepcopy(stock).first))


def test_blocks_that_no_module_is() -> None:
    with pytest.raises(UnknownOptionError, match=r"block 'frist'.*first"):
        patch_model(Named(), CompressionConfig(blocks=("frist",)))
    for wrong in ("first", (7,), (int,)):
        with pytest.raises(UnknownOptionError, match="names of modules"):
            CompressionConfig(blocks=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownOptionError, match="with blocks"):
        CompressionConfig(blocks=("first",), plans=False)


class Drawing(nn.Module):
    """Draws from the generators that torch does not know."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(WIDTH, WIDTH), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() * self.draw()


@pytest.mark.parametrize("draw", [random.random, lambda: float(numpy.random.rand())])
def test_numbers_that_torch_does_not_draw_are_drawn_in_each_call(draw: Any) -> None:
    stock = Stack(nn.ModuleList(Drawing(draw) for _ in range(2))).train()
    ours = patch_model(copy.deepcopy(stock))
    for _ in range(2):
        found = []
        for model in (ours, stock):
            random.seed(3)
            numpy.random.seed(3)
            found.append(step(model, inputs()))
            model.zero_grad()
        assert equal(*found)
    assert all("draws numbers from numpy" in plans.why for plans in plans_of(ours))
