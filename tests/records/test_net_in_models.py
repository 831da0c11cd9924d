"""The net in patched models: beside hooks of others, checkpointing and transforms, and what it keeps there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
    # a dropout's mask is bits
    assert sizes[True] < sizes[False] - 0.85 * 24 * 32 * 4


def test_transforms_of_torch_func() -> None:
    stock, model, x = Foreign().eval(), patch_model(Foreign().eval()), torch.randn(SHAPE)
    expected = torch.func.grad(lambda x: stock(x).sum())(x)
    assert_equal_bits([torch.func.grad(lambda x: model(x).sum())(x)], [expected])


def test_it_can_be_switched_off() -> None:
    x = torch.randn(SHAPE, requires_grad=True)
    on, off = (patch_model(Foreign(), CompressionConfig(net=net)) for net in (True, False))
    assert kept_bytes(lambda: on(x)) < kept_bytes(lambda: off(x)) - 0.9 * x.nbytes


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
