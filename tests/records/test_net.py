"""The net under all rules: what stock code saves is not kept where it can be recomputed, with stock's bits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.codecs import IDENTITY
from hf_actcompress.records import frame, live_entries, nodes
from hf_actcompress.records.net import netted
from hf_actcompress.records.nodes import POINTWISE_NODES, Pointwise
from tests.oracle import assert_equal_bits, kept_bytes

SHAPE = (24, 32)


@contextmanager
def net() -> Iterator[None]:
    with frame(), netted(IDENTITY, {}):
        yield


@contextmanager
def stock() -> Iterator[None]:
    yield


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SHAPE, generator=generator).abs().add_(0.1).to(dtype).requires_grad_() for _ in range(2))
    weight = torch.randn(32, 32, generator=generator).to(dtype).requires_grad_()
    return a, b, weight


# every kind of node by a call that makes it; they take tensors that are results, as in a model
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "AbsBackward0": lambda a, b: a.abs(),
    "AvgPool2DBackward0": lambda a, b: F.avg_pool2d(a[None], 3, 1, 1, count_include_pad=False),
    "ClampBackward1": lambda a, b: a.clamp(max=1.8),
    "CosBackward0": lambda a, b: a.cos(),
    "DivBackward0": lambda a, b: a / b,
    "GeluBackward0": lambda a, b: F.gelu(a, approximate="tanh"),
    "GluBackward0": lambda a, b: F.glu(torch.cat([a, b], -1), -1),
    "HardswishBackward0": lambda a, b: F.hardswish(a),
    "LeakyReluBackward0": lambda a, b: F.leaky_relu(a, 0.3),
    "LogBackward0": lambda a, b: a.log(),
    "MaxPool2DWithIndicesBackward0": lambda a, b: F.max_pool2d(a[None], 3, 1, 1),
    "MishBackward0": lambda a, b: F.mish(a),
    "MulBackward0": lambda a, b: a * b,
    "PowBackward0": lambda a, b: a.pow(3),
    "SiluBackward0": lambda a, b: F.silu(a),
    "SinBackward0": lambda a, b: a.sin(),
    "SoftplusBackward0": lambda a, b: F.softplus(a, 2.0, 10.0),
    "WeightNormInterfaceBackward0": lambda a, b: torch._weight_norm(a, b[:, :1], 0),
}


def test_every_row_of_the_table_has_a_call() -> None:
    assert {*CALLS, "NativeDropoutBackward0"} == {*POINTWISE_NODES}


@pytest.mark.parametrize("kind", CALLS)
def test_the_output_of_a_node_is_not_kept(kind: str) -> None:
    def forward() -> Tensor:
        y = CALLS[kind](a + 1, b + 1)
        assert type(y.grad_fn).__name__ == kind
        return (y @ weight, y.view(12, 2, 32).flatten(1) @ weight.repeat(2, 1))[0].sum()

    for dtype in (torch.float32, torch.bfloat16):
        a, b, weight = inputs(dtype)
        assert_same(forward, (a, b, weight))
    saved = kept(forward, stock) - kept(forward, net)
    assert saved >= a.nbytes, "the product keeps nothing of its input"


def assert_same(forward: Callable[[], Tensor], over: tuple[Tensor, ...]) -> None:
    """Loss and gradients are stock's bits, in a second backward too, and where only some are asked for."""
    results = []
    for around in (stock, net):
        torch.manual_seed(3)
        with around():
            loss = forward()
        first = torch.autograd.grad(loss, over, retain_graph=True, allow_unused=True)
        again = torch.autograd.grad(loss, over[-1:], retain_graph=True)
        results.append([loss, *(g for g in (*first, *again) if g is not None)])
        assert_equal_bits([first[-1]], again)
    assert_equal_bits(*results)
    assert live_entries() == 0


def kept(forward: Callable[[], Tensor], around: Callable[[], object]) -> int:
    def run() -> Tensor:
        with around():  # type: ignore[attr-defined]
            return forward()

    return kept_bytes(run)


def test_chains_are_computed_again_as_a_whole() -> None:
    """act(gate) * up in an experts' style: both are views of one product, and two layers read the result."""
    a, _, weight = inputs()
    up, down = torch.randn(32, 64).requires_grad_(), torch.randn(32, 32).requires_grad_()

    def forward() -> Tensor:
        gate, value = ((a + 1) @ up).chunk(2, -1)
        h = F.silu(gate) * value
        return (h @ weight).sum() + (h @ down).square().sum()

    assert_same(forward, (a, up, weight, down))
    # stock: the input, gate and up in one, silu, h, and what is squared
    assert kept(forward, stock) - kept(forward, net) == 2 * a.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks_of_functional_dropout_are_bits(dtype: torch.dtype) -> None:
    a, _, weight = inputs(dtype)

    def forward() -> Tensor:
        return (F.dropout(F.gelu(a + 1), 0.3) @ weight).sum()

    assert_same(forward, (a, weight))
    # stock: the GELU's input, the mask, the dropout's output
    assert kept(forward, stock) - kept(forward, net) == 2 * a.nbytes - a.numel() // 8


def test_a_product_that_looks_like_a_dropout_is_none() -> None:
    a, _, weight = inputs()
    mask = torch.rand(SHAPE).round()

    def forward() -> Tensor:
        x = a + 1
        return ((F.dropout(x, 0.5) + x * mask) @ weight).sum()

    assert_same(forward, (a, weight))


def test_what_was_written_on_without_a_gradient_is_kept() -> None:
    a, _, weight = inputs()

    def forward() -> Tensor:
        y = F.silu(a + 1)
        with torch.no_grad():
            y[:, ::2] = 3
        return (y @ weight).sum()

    assert_same(forward, (a, weight))


def test_a_formula_that_torch_has_changed_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POINTWISE_NODES, "SiluBackward0", Pointwise(torch.sigmoid))
    monkeypatch.setattr(nodes, "_proved", {})
    a, _, weight = inputs()
    assert_same(lambda: (F.silu(a + 1) @ weight).sum(), (a, weight))


def test_what_is_kept_does_not_depend_on_what_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first product of a process is tried, which makes autograd nodes while the next product's node is made."""
    monkeypatch.setattr(nodes, "_proved", {})
    a, b, weight = inputs()

    def forward() -> Tensor:
        x, y = a + 1, b + 1
        return ((x * y) * y @ weight).sum()

    assert kept(forward, net) == kept(forward, net)


def test_a_write_in_place_is_stocks_error() -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        h = x + 1
        y = h @ weight
        h.add_(1)
        return y.sum()

    for around in (stock, net):
        a, _, weight = inputs()
        with around():
            loss = forward(a, weight)
        with pytest.raises(RuntimeError, match="inplace operation.*is at version 1; expected version 0"):
            loss.backward()


def test_nothing_outlives_the_graph() -> None:
    """No cycle through a node's own output, with a result that is saved by the node that makes it."""
    a, _, weight = inputs()
    gc.disable()
    try:
        with net():
            y = (a @ weight).sigmoid()
            z = F.silu(y) * y
            loss = (z @ weight).sum()
        references = [weakref.ref(x) for x in (y, z)]
        storage = weakref.ref(z.untyped_storage())
        del y, z, loss
        assert all(reference() is None for reference in references) and storage() is None
    finally:
        gc.enable()
    assert live_entries() == 0


@pytest.mark.parametrize("dim", [0, 2])
def test_a_weight_that_a_norm_makes_is_not_kept(dim: int) -> None:
    """A convolution with a weight norm, as in Wav2Vec2 (norms of the last dimension) and EnCodec (of the first)."""
    x = torch.randn(2, 24, 40)
    conv = torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(24, 24, 8), dim=dim)
    assert_same(lambda: conv(x).square().sum(), tuple(conv.parameters()))
    assert kept(lambda: conv(x).sum(), stock) - kept(lambda: conv(x).sum(), net) >= 24 * 24 * 8 * 4


def test_rows_of_a_weight_are_taken_again() -> None:
    """The weights of batched experts: one for each pair of token and expert."""
    a, _, _ = inputs()
    experts = torch.nn.Parameter(torch.randn(4, 32, 32))
    index = torch.arange(24) % 3

    def forward() -> Tensor:
        return torch.bmm(experts[index], (a + 1).unsqueeze(-1)).sum() + (experts[:, index] * 2).square().sum()

    assert_same(forward, (a, experts))
    assert kept(forward, stock) - kept(forward, net) == 24 * 32 * 32 * 4


def test_rows_of_an_embedding_are_taken_again() -> None:
    """Embeddings of relative positions: one for each pair of tokens, in every layer that reads them."""
    a, weight, _ = inputs()
    table = torch.nn.Parameter(torch.randn(9, 32))
    distances = torch.arange(24)[:, None].sub(torch.arange(24)).clamp(-4, 4) + 4

    def forward() -> Tensor:
        return torch.einsum("ld,lrd->lr", a + weight, F.embedding(distances, table)).square().sum()

    assert_same(forward, (a, table))
    assert kept(forward, stock) - kept(forward, net) == 24 * 24 * 32 * 4


def test_indices_of_a_max_pooling_take_fewer_bytes() -> None:
    a = torch.randn(2, 8, 24, 24, requires_grad=True)

    def forward() -> Tensor:
        return F.max_pool2d((a + 1).sin(), 3, 2, 1).sum()

    assert_same(forward, (a,))
    # 6 of the 8 bytes of an index; and the sine, which is recomputed
    assert kept(forward, stock) - kept(forward, net) == 6 * 2 * 8 * 12 * 12 + a.nbytes
