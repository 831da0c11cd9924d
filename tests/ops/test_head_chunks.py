"""Chunks of the loss head: one is in memory at a time, and a cast to fp32 makes no copy of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_actcompress import measure_step
from hf_actcompress.ops import linear_cross_entropy
from hf_actcompress.ops.deferred_values import DeferredOp
from hf_actcompress.reference import linear_cross_entropy as reference
from hf_actcompress.reference import logits_chunks
from hf_actcompress.reference.device_rules import under_rules
from tests.on_device import OnDevice

WIDENED = DeferredOp(torch.ops.aten._to_copy.default, (), {"dtype": torch.float32})


class OneAtATime:
    """A function of chunks, as a model applies one to its logits. What it was given and has returned must be freed."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []

    def note(self, x: Tensor) -> None:
        self.seen.append(weakref.ref(x))

    def __call__(self, x: Tensor) -> Tensor:
        assert not any(ref() is not None for ref in self.seen), "a chunk is in memory while the next one is made"
        y = x * 2
        self.note(y)
        return y


def problem(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """h [48, 16], weight [640, 16] and targets; all rows have one."""
    h, weight = (torch.randn(rows, 16).to(dtype).requires_grad_() for rows in (48, 640))
    return h, weight, torch.randint(640, (48,))


@pytest.mark.usefixtures("many_chunks")
def test_a_chunk_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    h, weight, target = problem()
    add = reference._accumulate
    for logits in (None, (h @ weight.t()).detach()):
        chunks = OneAtATime()

        def noted(total: Tensor, dx: Tensor, part: Tensor, note: Callable[[Tensor], None] = chunks.note) -> None:
            note(dx)
            add(total, dx, part)

        monkeypatch.setattr(reference, "_accumulate", noted)
        loss = linear_cross_entropy(h, weight, target, logits=logits, pointwise=(chunks,))
        forward = len(chunks.seen)
        torch.autograd.grad(loss, (h, weight))
        assert forward > 2 and len(chunks.seen) > forward + 2


def step(dtype: torch.dtype, cast: Callable[[Tensor], Tensor], whole: bool) -> tuple[list[Tensor], int]:
    """The loss and its gradients, and the peak of a second step in bytes."""
    torch.manual_seed(0)
    h, weight, target = problem(dtype)
    logits = (h @ weight.t()).detach() if whole else None

    def run() -> list[Tensor]:
        loss = linear_cross_entropy(h, weight, target, logits=logits, pointwise=(cast,))
        return [loss.detach(), *torch.autograd.grad(loss, (h, weight))]

    return run(), measure_step(run, "cpu").peak_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("whole", [False, True], ids=["chunks", "whole logits"])
def test_a_cast_to_fp32_changes_no_bit_and_copies_nothing(dtype: torch.dtype, whole: bool) -> None:
    """As against the same cast by a function that is not known to be one. fp64 is rounded by it, and keeps it."""
    found, peak = step(dtype, WIDENED, whole)
    expected, other = step(dtype, lambda x: x.float(), whole)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert peak < other if dtype.itemsize == 2 else peak == other


def test_a_device_has_fewer_and_larger_chunks() -> None:
    """BERT-base on 16 x 128 tokens. A former version had 15 chunks in backward and 16 in the forward."""
    h = torch.empty(2048, 768, device="meta")

    def counts() -> tuple[int, int, int]:
        columns = logits_chunks.chunks(30522, 2048, h.numel(), logits_chunks.bounds_of(h))
        rows = list(logits_chunks.row_chunks(h, 30522))
        pieces = [logits_chunks.row_pieces(torch.empty(part.stop - part.start, 30522, device="meta")) for part in rows]
        return len(list(columns)), len(rows), sum(len(list(few)) for few in pieces)

    with under_rules(OnDevice()):
        assert counts() == (4, 4, 4)
