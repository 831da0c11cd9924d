"""Sums and other joins of tensors that are kept in any case are not kept themselves. Gradients have stock's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.codecs.table import CODECS
from hf_actcompress.records import frame, joined, netted
from hf_actcompress.records.joined import LONGEST
from tests.records.test_net import assert_same, kept, net, stock

SHAPE = (2, 6, 5, 7)
NBYTES = 2 * 6 * 5 * 7 * 4


def leaves(*shapes: tuple[int, ...], seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)


def less(forward: Callable[[], Tensor]) -> int:
    """The bytes that the net does not keep."""
    return kept(forward, stock) - kept(forward, net)


# joins of two tensors that other nodes keep, x and y
JOINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y,
    "difference": lambda x, y: x - y,
    "sum of products": lambda x, y: x * y + y,
    "concatenation": lambda x, y: torch.cat([x, y], 1),
    "concatenation from behind": lambda x, y: torch.cat([x, y], -3),
    "copy in another order": lambda x, y: (x * y).permute(0, 2, 3, 1).contiguous(),
    "sum of a permuted map": lambda x, y: x + (y * y).permute(0, 1, 3, 2).permute(0, 1, 3, 2),
}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", JOINS)
def test_a_join_is_not_kept(name: str, memory_format: torch.memory_format) -> None:
    a, b = leaves(SHAPE, SHAPE)

    def forward() -> Tensor:
        x, y = ((t + 1).contiguous(memory_format=memory_format) for t in (a, b))
        read = x.sin().sum() + y.sin().sum()
        joint = JOINS[name](x, y)
        # a convolution's kernel depends on the order of the dimensions in memory
        weight = torch.ones(3, joint.size(1), 2, 2).requires_grad_()
        return F.conv2d(joint, weight).square().sum() + read

    assert_same(forward, (a, b))
    assert less(forward) >= NBYTES


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_chain_is_kept_at_every_fifth_sum(memory_format: torch.memory_format) -> None:
    """A residual stream: each layer reads the sum, and the scaled output of each layer is kept."""
    depth = 2 * (LONGEST + 1)
    a, *weights = leaves(SHAPE, *[(6, 6, 1, 1)] * depth)
    scale = torch.full((6, 1, 1), 0.5, requires_grad=True)

    def forward() -> Tensor:
        x = (a + 1).contiguous(memory_format=memory_format)
        for weight in weights:
            x = x + scale * F.conv2d(x, weight)
        return x.sum()

    assert_same(forward, (a, scale, *weights))
    # the last sum is read by nobody
    assert less(forward) == (depth - 2) * NBYTES


def test_a_chain_makes_few_sums_at_a_time() -> None:
    """In backward a value lives from its first reader to its last one, and the anchors bound the chain."""
    made: list[int] = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, dy: Tensor) -> Tensor:
            made.append(len([h for h in recipes if h.recipe._value is not None]))
            return dy

    recipes: list[joined.Made] = []
    a, *weights = leaves(SHAPE, *[(6, 6, 1, 1)] * 12)
    scale = torch.full((6, 1, 1), 0.5, requires_grad=True)
    build = joined.Made.__init__

    def noted(made: joined.Made, *args: object) -> None:
        build(made, *args)  # type: ignore[arg-type]
        recipes.append(made)

    with pytest.MonkeyPatch.context() as patch, net():
        patch.setattr(joined.Made, "__init__", noted)
        x = a + 1
        for weight in weights:
            x = x + scale * Noting.apply(F.conv2d(x, weight))  # type: ignore[no-untyped-call]
        loss = x.sum()
    loss.backward()
    assert recipes and 0 < max(made) <= LONGEST
    assert not any(h.recipe._value is not None for h in recipes)


def test_a_sum_with_something_unknown_is_kept() -> None:
    a, b = leaves(SHAPE, SHAPE)
    forwards: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, y: x + 2,
        lambda x, y: x + y.detach(),
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x + y.mean(1, keepdim=True),
    ]
    for join in forwards:

        def forward(join: Callable[[Tensor, Tensor], Tensor] = join) -> Tensor:
            x, y = a + 1, b + 1
            read = x.sin().sum() + y.sin().sum()
            return join(x, y).square().sum() + read

        assert_same(forward, (a, b))
        assert less(forward) == 0


def test_a_summand_that_was_written_on_is_seen() -> None:
    """No node shows a write under no_grad, so every join of a model is compared once, even if one like it was."""
    a, b = leaves(SHAPE, SHAPE)

    def forward() -> Tensor:
        x, y = a + 1, b + 1
        h = x * y
        right = (h + x).square().sum()
        with torch.no_grad():
            h.clamp_(max=0.5)
        return (h + x).square().sum() + right

    assert_same(forward, (a, b))
    assert less(forward) == NBYTES


def test_a_scale_that_is_sharded_after_the_forward_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is recomputed in the backward of another layer, for which FSDP does not gather this one's weights."""
    monkeypatch.setattr(joined, "distributed", lambda: True)
    a, weight = leaves(SHAPE, (3, 6, 2, 2))

    def forward(scale: Tensor) -> Tensor:
        x = a + 1
        return F.conv2d(x.sin() + scale * x.sin(), weight).square().sum() + x.sin().square().sum()

    for size in ((6, 1, 1), SHAPE[1:]):
        scale = torch.nn.Parameter(torch.full(size, 0.5))
        expected = torch.autograd.grad(forward(scale), weight)[0]
        with net():
            loss = forward(scale)
        scale.data.fill_(torch.nan)
        assert torch.equal(torch.autograd.grad(loss, weight)[0], expected)


def test_a_join_of_coded_tensors_goes_through_the_codec_itself() -> None:
    (a,) = leaves((2, 8, 32, 32))
    (weight,) = leaves((8, 8, 1, 1), seed=1)
    seen: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), frame(), netted(CODECS["int8"], {}):
        x = F.conv2d(a, weight)
        y = (x.sin() + x.sin()).square()
    y.sum().backward()
    codes = {t.data_ptr(): t.numel() for t in seen if t.dtype in (torch.int8, torch.uint8)}
    # those of x and those of the sum
    assert sum(codes.values()) == 2 * x.numel()
