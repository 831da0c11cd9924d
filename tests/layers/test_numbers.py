"""Layers whose code reads numbers in tensors that it is given: each set of numbers has a graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import LongformerConfig, LongformerForSequenceClassification
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.mimi.configuration_mimi import MimiConfig
from transformers.models.mimi.modeling_mimi import MimiEncoder
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from hf_actcompress import patch_model
from hf_actcompress.graphs import values
from hf_actcompress.graphs.values import numbers_in
from hf_actcompress.layers import layer as plans
from hf_actcompress.layers import state
from tests.oracle import assert_equal_bits, kept_bytes

SMALL = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2,
    "hidden_act": "gelu",
}  # fmt: skip
# pictures by their heights and widths in patches: as many, fewer, the same again, and as many with other sizes
BATCHES = [[(8, 8), (8, 8)], [(8, 4)], [(8, 8), (8, 8)], [(4, 4), (8, 8)], [(8, 8), (4, 4)], [(8, 12), (8, 4)]]


def tower() -> nn.Module:
    torch.manual_seed(0)
    return Qwen2VisionTransformerPretrainedModel._from_config(Qwen2VLVisionConfig(**SMALL)).train()


def loss(model: nn.Module, sizes: Sequence[tuple[int, int]]) -> Tensor:
    grid = torch.tensor([(1, *size) for size in sizes])
    count = int(grid.prod(-1).sum())
    pixels = torch.randn(count, 3 * 2 * 16, generator=torch.Generator().manual_seed(count))
    return model(pixels, grid)[0].square().sum()


def gradients(model: nn.Module, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    model.zero_grad()
    loss(model, sizes).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_pictures_of_any_sizes() -> None:
    """Attention inside of each picture: its code reads where the pictures begin."""
    stock = tower()
    ours = patch_model(copy.deepcopy(stock))
    for sizes in BATCHES:
        assert_equal_bits(gradients(ours, sizes), gradients(stock, sizes))
    kept = [kept_bytes(lambda model=model: loss(model, BATCHES[0])) for model in (stock, ours)]
    assert kept[1] < 0.6 * kept[0]
    assert all(block.actcompress.plans.calls and not block.actcompress.plans.leaf_calls for block in ours.blocks)


def test_many_numbers_run_module_by_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of graphs: each takes a trace, and memory."""
    monkeypatch.setattr(plans, "_MOST_NODES", 1)
    stock = tower()
    ours = patch_model(copy.deepcopy(stock))
    for sizes in BATCHES:
        assert_equal_bits(gradients(ours, sizes), gradients(stock, sizes))
    known = len(ours.blocks[0].actcompress.plans.known())
    for width in range(4, 20, 2):
        gradients(ours, [(8, width), (4, 4)])
    assert len(ours.blocks[0].actcompress.plans.known()) == known, "numbers of every step fill the memory"
    reasons = {module.actcompress.plans.why for module in ours.blocks}
    assert reasons == {"its code makes other graphs for other sizes or numbers, and there are many already"}
    assert all(module.actcompress.plans.calls for module in ours.blocks), "the first numbers keep their graph"


def test_numbers_are_read_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading waits for a GPU."""
    reads, own = [], values._bytes
    monkeypatch.setattr(values, "_bytes", lambda x: reads.append(x) or own(x))
    x = torch.tensor([3, 5, 8])
    assert numbers_in(x) == numbers_in(x) != numbers_in(x + 1)
    assert len(reads) == 2
    before = numbers_in(x)
    x[1] = 6
    assert numbers_in(x) != before
    ours = patch_model(tower())
    gradients(ours, BATCHES[0])
    reads.clear()
    loss(ours, BATCHES[0])
    few = len(reads)
    ours.blocks.extend(copy.deepcopy(block) for block in list(ours.blocks))
    loss(ours, BATCHES[0])
    reads.clear()
    loss(ours, BATCHES[0])
    assert len(reads) == few > 0


class Checked(nn.Module):
    """The layer of a DETR: it clamps what is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * x.exp()
        if self.training and (not torch.isfinite(y).all() or (y.abs() > 1e30).any()):
            y = y.clamp(-1e3, 1e3)
        return y


def test_checks_of_what_is_computed() -> None:
    torch.manual_seed(0)
    stock = nn.Sequential(*(Checked() for _ in range(2))).train()
    ours = patch_model(copy.deepcopy(stock))
    x = torch.randn(2, 16, 32)
    for scale, planned in ((1.0, 2), (100.0, 2), (1.0, 4), (40.0, 4)):
        results = []
        for model in (stock, ours):
            model.zero_grad()
            y = model(x * scale)
            y.mean().backward()
            results.append([y.detach(), *(p.grad for p in model.parameters())])
        assert torch.equal(results[0][0], results[1][0])
        assert_equal_bits(*[[torch.nan_to_num(g) for g in grads] for grads in results])
        assert sum(layer.actcompress.plans.calls for layer in ours) >= planned
    assert ours[0].actcompress.plans.why == "what its code looks at is not as it was assumed"
    kept = [kept_bytes(lambda model=model: model(x).mean()) for model in (stock, ours)]
    assert kept[1] < 0.7 * kept[0]
    for _ in range(2 * state.MISSED):
        ours(x * 100)
    assert all(known.plan == state.FAILED for known in ours[0].actcompress.plans.known()), "each call runs twice"


def test_buffers_that_convolutions_read() -> None:
    """Mimi's strides and paddings are buffers, from which its code computes how much to pad."""
    torch.manual_seed(0)
    config = MimiConfig(
        hidden_size=32, num_filters=8, num_residual_layers=1, upsampling_ratios=[4, 2], codebook_size=16,
        codebook_dim=16, vector_quantization_hidden_dimension=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, intermediate_size=64, upsample_groups=32,
    )  # fmt: skip
    stock = MimiEncoder(config).train()
    ours = patch_model(copy.deepcopy(stock))
    for length in (64, 96, 128):
        x = torch.randn(2, 1, length)
        grads = []
        for model in (stock, ours):
            model.zero_grad()
            model(x).square().sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert_equal_bits(*grads)
    kept = [kept_bytes(lambda model=model: model(x).square().sum()) for model in (stock, ours)]
    assert kept[1] < 0.8 * kept[0]


def test_tokens_that_attend_to_all() -> None:
    """Longformer's global attention: which tokens these are decides how many elements its tensors have."""
    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        attention_window=8, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, max_position_embeddings=130,
    )  # fmt: skip
    stock = LongformerForSequenceClassification(config).train()
    ours, ids = patch_model(copy.deepcopy(stock)), torch.arange(2 * 64).view(2, 64) % 60 + 3

    def found(model: nn.Module, tokens: Sequence[int]) -> list[Tensor]:
        model.zero_grad()
        whole = torch.zeros_like(ids).index_fill_(1, torch.tensor(tokens), 1)
        model(input_ids=ids, global_attention_mask=whole, labels=torch.tensor([0, 1])).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for tokens in ([0], [0, 5], [0], [3]):
        assert_equal_bits(found(ours, tokens), found(stock, tokens))
    layers = [layer.actcompress.plans for layer in ours.longformer.encoder.layer]
    assert all(plans.calls == 4 and not plans.leaf_calls for plans in layers)
    kept = [
        kept_bytes(lambda model=model: model(input_ids=ids, labels=torch.tensor([0, 1])).loss)
        for model in (stock, ours)
    ]
    assert kept[1] < 0.5 * kept[0]


class Looking(GradientCheckpointingLayer):
    """Checks a mask, and takes scales from a table by numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(7))

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        y = self.linear(x) * self.table[ids][..., None]
        return y if mask.all() else y * mask[..., None]


class Writing(GradientCheckpointingLayer):
    """Makes a mask in a part of which it writes, through another name of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.zeros(5, dtype=torch.bool)
        chosen[:2] = True
        return self.linear(x)[:, chosen] * int(chosen.long().sum())


def test_a_mask_that_is_written_on_is_not_known_any_more() -> None:
    stock = nn.Sequential(Writing()).train()
    ours, x = patch_model(copy.deepcopy(stock)), torch.randn(2, 5, 8)
    results = []
    for model in (stock, ours):
        y = model(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
    assert_equal_bits(*results)


def test_a_mask_is_checked_and_an_index_is_not_read() -> None:
    """A graph for each of them would be one for each batch."""
    model = patch_model(nn.Sequential(Looking()).train())
    (layer,) = model
    x, step = torch.randn(2, 5, 8, requires_grad=True), torch.arange(5).expand(2, 5)
    for i in range(4):
        layer(x, step >= i - 2, (step + i) % 7).sum().backward()
        assert len(layer.actcompress.plans.known()) == 1 and layer.actcompress.plans.calls
