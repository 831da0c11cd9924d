"""What the small graph of an attention function keeps: not the tensors that the layer's backward gives it again."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from hf_actcompress.ops.opaque_graph import Box, End, Enter, Ran, keeping_places, run_backward

SIZES = (2, 3, 5, 4)


class _Tanh(torch.autograd.Function):
    """Keeps its own result.

    Attributes:
        nodes: References to the nodes that are alive.
    """

    nodes: weakref.WeakSet[Any] = weakref.WeakSet()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        _Tanh.nodes.add(ctx)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return dy * (1 - y * y)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Keeps q and k as other views, v as it is, and a result."""
    scores = torch.einsum("nqd,nkd->nqk", q.flatten(0, 1), k.flatten(0, 1))
    y: Tensor = _Tanh.apply(scores)  # type: ignore[no-untyped-call]
    return y @ v.flatten(0, 1)


def _ran(tensors: list[Tensor], given: bool) -> tuple[Tensor, Ran]:
    box = Box([(x.shape, x.dtype) for x in tensors])
    with torch.enable_grad():
        own = Enter.apply(box, torch.empty(0, requires_grad=True), *tensors)  # type: ignore[no-untyped-call]
        if given:
            with keeping_places(box, tensors):
                out = _attend(*own)
        else:
            out = _attend(*own)
        return out.detach(), Ran(End.apply(box, out), box)  # type: ignore[no-untyped-call]


@pytest.fixture
def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(SIZES) for _ in range(3)]


@pytest.mark.parametrize("layout", ["same", "transposed", "sliced"])
def test_the_gradients_are_those_without_it(layout: str, tensors: list[Tensor]) -> None:
    """Backward may get the tensors in another layout, and runs twice."""
    dout = torch.randn(SIZES[0] * SIZES[1], *SIZES[2:])
    expected = run_backward(_ran(tensors, False)[1], dout, (), 0)
    ran = _ran(tensors, True)[1]
    again = {
        "same": [x.clone() for x in tensors],
        "transposed": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors],
        "sliced": [torch.cat([x, x], -1)[..., SIZES[-1] :] for x in tensors],
    }[layout]
    for _ in range(2):
        found = run_backward(ran, dout, again, 0)
        assert all(map(torch.equal, found, expected))
        assert not ran.box.given and not ran.box.grads


def test_the_tensors_are_freed(tensors: list[Tensor]) -> None:
    """What the function keeps of its own results is freed, too, without a search for cycles."""
    out, ran = _ran(tensors, True)
    held = [x.untyped_storage()._cdata for x in tensors]
    counts = [torch._C._storage_Use_Count(x) for x in held]
    kept = _ran(tensors, False)[1]
    assert all(torch._C._storage_Use_Count(x) > n for x, n in zip(held, counts, strict=True))
    assert len(_Tanh.nodes) == 2
    del out, ran, kept
    assert not _Tanh.nodes
    assert [torch._C._storage_Use_Count(x) for x in held] == counts


def test_parts_of_one_tensor_are_told_apart() -> None:
    """Keys and values that are halves of one tensor, and an expanded one, which is kept."""
    torch.manual_seed(0)
    q, both = torch.randn(SIZES), torch.randn(*SIZES[:3], 2 * SIZES[3])
    for k, v in (both.chunk(2, -1), (both[..., :4], both[:, :1, :, 4:].expand(SIZES))):
        dout = torch.randn(SIZES[0] * SIZES[1], *SIZES[2:])
        expected = run_backward(_ran([q, k, v], False)[1], dout, (), 0)
        found = run_backward(_ran([q, k, v], True)[1], dout, [x.clone() for x in (q, k, v)], 0)
        assert all(map(torch.equal, found, expected))


def test_other_hooks_get_the_rest(tensors: list[Tensor]) -> None:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    dout = torch.randn(SIZES[0] * SIZES[1], *SIZES[2:])
    with saved_tensors_hooks(pack, lambda x: x):  # type: ignore[no-untyped-call]
        _ran(tensors, True)
    given = {x.untyped_storage()._cdata for x in tensors}
    assert packed and not any(x.untyped_storage()._cdata in given for x in packed)
    with save_on_cpu():  # type: ignore[no-untyped-call]
        ran = _ran(tensors, True)[1]
    expected = run_backward(_ran(tensors, False)[1], dout, (), 0)
    assert all(map(torch.equal, run_backward(ran, dout, tensors, 0), expected))
