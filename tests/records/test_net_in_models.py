"""The net in patched models: beside hooks of others, checkpointing and transforms, and what it keeps there."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.records import live_entries
from tests.oracle import assert_equal_bits, kept_bytes

SHAPE = (24, 32)


class Foreign(nn.Module):
    """A layer of ours between calls that no rule knows."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return x + self.down(F.dropout(F.silu(gate) * up, 0.1, self.training))


def trained(model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(5)
    x = torch.linspace(-1, 1, 24 * 32).view(SHAPE).requires_grad_()
    run(model, x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def _saved_on_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(model(x))


def _in_other_hooks(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t.detach().clone(),), lambda held: held[0]):
        return model(x)


RUNS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda model, x: model(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, model(x), use_reentrant=False),
    "reentrant checkpoint": lambda model, x: checkpoint(model, model(x), use_reentrant=True),
    "saved on cpu": _saved_on_cpu,
    "other hooks": _in_other_hooks,
}


@pytest.mark.parametrize("name", RUNS)
def test_in_company(name: str) -> None:
    ours = patch_model(Foreign())
    assert_equal_bits(trained(Foreign(), RUNS[name]), trained(ours, RUNS[name]))
    assert live_entries() == 0


class Checkpointed(nn.Module):
    """Two checkpointed calls of a function, the second of which keeps what the first has made."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.norm, self.runs = function, nn.LayerNorm(32), 0

    def _counted(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.function(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self._counted, x, use_reentrant=False)
        return x


TABLE = nn.Parameter(torch.linspace(-2, 2, 40 * 32).view(40, 32))
# what the nodes of these save is packed by the hooks of the checkpoint
IN_CHECKPOINTS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda y: y + y.tanh() * torch.rand(SHAPE),
    "quotient": lambda y: y + y.tanh() / torch.tensor(3.0),
    "rows": lambda y: TABLE[y.argmax(-1)],
}


@pytest.mark.parametrize("name", IN_CHECKPOINTS)
def test_no_checkpoint_runs_again_in_the_forward(name: str) -> None:
    model = patch_model(Checkpointed(IN_CHECKPOINTS[name]))
    loss = model(torch.linspace(-1, 1, 24 * 32).view(SHAPE).requires_grad_()).sum()
    assert model.runs == 2
    loss.backward()
    assert model.runs > 2


def test_hooks_outside_get_what_the_net_keeps() -> None:
    sizes = {}
    for patched in (False, True):
        seen: list[int] = []

        def pack(x: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(x.nbytes)
            return x.detach()

        model = patch_model(Foreign()) if patched else Foreign()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.randn(SHAPE, requires_grad=True))
        sizes[patched] = sum(seen)
    assert sizes[True] < 0.8 * sizes[False]


def test_transforms_of_torch_func() -> None:
    stock, model, x = Foreign().eval(), patch_model(Foreign().eval()), torch.randn(SHAPE)
    expected = torch.func.grad(lambda x: stock(x).sum())(x)
    assert_equal_bits([torch.func.grad(lambda x: model(x).sum())(x)], [expected])


def test_it_can_be_switched_off() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    on, off = (patch_model(Foreign(), CompressionConfig(net=net)) for net in (True, False))
    assert kept_bytes(lambda: on(x)) < kept_bytes(lambda: off(x)) - 2 * x.nbytes


class Head(nn.Module):
    """Two layers of ours behind a GELU of nobody's: the second keeps what the first keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(F.gelu(self.first(x))))


@pytest.mark.parametrize("kind", [Foreign, Head])
def test_as_much_is_kept_with_hooks_outside(kind: type[nn.Module]) -> None:
    """An estimate has such hooks, a training has none."""
    model, x = patch_model(kind()), torch.randn(SHAPE, requires_grad=True)

    def watched() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t):
            return model(x)

    assert kept_bytes(lambda: model(x)) == kept_bytes(watched)


class CopiedAttention(nn.Module):
    """Torch's attention on queries in the order of the heads, as rotary angles leave them: its output is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, swapped: tuple[int, int] = (1, 2)) -> Tensor:
        q = self.q(x).view(6, 4, 4, 8).transpose(1, 2)
        q = torch.cat([q[..., :4].sin(), q[..., 4:]], -1)
        y = F.scaled_dot_product_attention(q, q, q)
        y = y.view(6, 4, 4, 8).transpose(*swapped).contiguous()
        out: Tensor = self.out(y.reshape(24, 32))
        return out


@pytest.mark.parametrize("swapped", [(1, 2), (-3, -2), (0, 1), (2, 3)])
def test_the_copy_of_an_attentions_output(swapped: tuple[int, int]) -> None:
    """It is recomputed, in whatever order its dimensions are copied."""
    torch.manual_seed(0)
    stock = CopiedAttention()
    ours = patch_model(copy.deepcopy(stock), CompressionConfig(selective=False))
    results = [trained(model, lambda model, x: model(x.detach(), swapped)) for model in (stock, ours)]
    assert_equal_bits(results[0][1:], results[1][1:])
    x = torch.randn(SHAPE)
    saved = kept_bytes(lambda: stock(x, swapped)) - kept_bytes(lambda: ours(x, swapped))
    # of the queries, the half that goes into the sine is kept as a copy
    assert saved == x.nbytes + x.nbytes // 2


def test_a_vision_models_fused_product_and_joined_images() -> None:
    """Rotated queries and keys are new tensors: their product with the values is kept for the values alone."""
    small = {
        "depth": 1,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "mlp_ratio": 2,
        "hidden_act": "gelu",
    }
    torch.manual_seed(0)
    stock = Qwen2VisionTransformerPretrainedModel._from_config(Qwen2VLVisionConfig(**small)).train()
    ours, bare = (patch_model(copy.deepcopy(stock), CompressionConfig(net=net)) for net in (True, False))
    x, grid = torch.randn(128, 3 * 2 * 4 * 4), torch.tensor([[1, 8, 8], [1, 8, 8]])

    def loss(model: nn.Module) -> Tensor:
        y: Tensor = model(x, grid)[0]
        return y.square().sum()

    for model in (stock, ours):
        loss(model).backward()
    used = ([p.grad for p in model.parameters() if p.grad is not None] for model in (stock, ours))
    assert_equal_bits(*used)
    # two thirds of the product, and what the next layer reads
    assert kept_bytes(lambda: loss(bare)) - kept_bytes(lambda: loss(ours)) >= 3 * 128 * 32 * 4


class Convolved(nn.Module):
    """The activation of a conformer between a norm of [B, S, C] and a convolution of [B, C, S]."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.norm, self.act, self.conv = nn.LayerNorm(32), nn.SiLU(), nn.Conv1d(32, 8, 3)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.act(self.norm(x).transpose(1, 2)))


def test_results_in_the_order_of_tokens_are_made_again() -> None:
    x = torch.randn(2, 24, 32, requires_grad=True)
    ours = patch_model(Convolved())
    grads = [torch.autograd.grad(m(x).square().sum(), (x, *m.parameters())) for m in (ours, Convolved())]
    assert_equal_bits(*grads)
    # the norm's input and its statistics; not the activation's result, nor the norm's
    assert kept_bytes(lambda: ours(x * 1)) < 1.2 * x.nbytes
