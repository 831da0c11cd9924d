"""What a step on fake tensors gets instead of the real thing: swapped in for its duration, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ... import dispatch
from ...codecs import offload
from ...models import attention
from ...reference import block_sparse, groups, linear_cross_entropy
from .fake_kernels import KernelResults, Kernels
from .tracker import FakeAllocator

_Swap = tuple[Any, str, Any]


@contextmanager
def stand_ins(allocator: FakeAllocator, kernels: KernelResults | None) -> Iterator[None]:
    """Everything that code on real tensors asks and that a fake tensor answers wrongly.

    Args:
        allocator: Counts.
        kernels: For a CUDA device: what its kernels are known to make; what is found out is added. None for a CPU.
    """
    cuda = kernels is not None
    swaps: list[_Swap] = [
        # a mask that can be skipped is skipped, as outside of tracing
        (masking_utils, "is_tracing", lambda tensor=None: False),
        *((module, "chunk_starts", _few_starts) for module in (groups, block_sparse)),
        (linear_cross_entropy, "_chunks", _few_chunks(allocator)),
        *((module, "get_rng_state", _counted_state(allocator, cuda)) for module in (torch, torch.random)),
    ]
    if kernels is not None:
        swaps += [
            (attention, "on_cpu", lambda x: False),
            (offload, "_to_host", _to_host(allocator)),
            (offload, "_to_device", lambda tensors, device: tuple(x.clone() for x in tensors)),
            *((module, "chunk_rows", _device_rows) for module in (groups, block_sparse)),
            (dispatch, "reference", Kernels(allocator, kernels)),
        ]
    before = [(home, name, getattr(home, name)) for home, name, _ in swaps]
    try:
        for home, name, value in swaps:
            setattr(home, name, value)
        yield
    finally:
        for home, name, value in before:
            setattr(home, name, value)


def _few_starts(count: int, step: int) -> Sequence[int]:
    """The first turns of a loop over chunks and its last: the turns between hold no more than the second."""
    starts = range(0, count, step)
    return starts if len(starts) <= 3 else (*starts[:2], starts[-1])


def _few_chunks(allocator: FakeAllocator) -> Callable[..., Iterator[slice]]:
    """The same for chunks of logits, whose results are joined: the turns between are one that counts nothing."""
    stock = linear_cross_entropy._chunks

    def chunks(total: int, others: int, budget: int) -> Iterator[slice]:
        every = list(stock(total, others, budget))
        if len(every) <= 4:
            yield from every
            return
        yield from every[:2]
        with allocator.elsewhere():
            yield slice(every[2].start, every[-2].stop)
        yield every[-1]

    return chunks


def _device_rows(features: int, device: torch.device) -> int:
    return max(1, groups.CHUNK_ELSEWHERE // max(features, 1))


def _counted_state(allocator: FakeAllocator, cuda: bool) -> Callable[[], Tensor]:
    """The generator's state is a real tensor, which no dispatch sees; that of a CUDA device is kept on the host."""
    stock = torch.get_rng_state

    def get_rng_state() -> Tensor:
        state = stock()
        allocator.count(state, 0 if cuda else None)
        return state

    return get_rng_state


def _to_host(allocator: FakeAllocator) -> Callable[[Tensor], Tensor]:
    def to_host(x: Tensor) -> Tensor:
        with allocator.elsewhere():
            return x.clone()

    return to_host
