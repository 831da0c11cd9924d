"""What a step on fake tensors gets instead of the real thing: swapped in for its duration, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from ... import dispatch, reference
from ...codecs import offload
from ...kernels import KERNELS
from ...models import attention
from ...reference import block_sparse, groups
from .tracker import FakeAllocator

_Swap = tuple[Any, str, Any]


@contextmanager
def stand_ins(allocator: FakeAllocator, *, cuda: bool) -> Iterator[None]:
    """Everything that code on real tensors asks and that a fake tensor answers wrongly."""
    swaps: list[_Swap] = [
        # a mask that can be skipped is skipped, as outside of tracing
        (masking_utils, "is_tracing", lambda tensor=None: False),
        *((module, "chunk_starts", _few_starts) for module in (groups, block_sparse)),
        *((module, "get_rng_state", _counted_state(allocator, cuda)) for module in (torch, torch.random)),
    ]
    if cuda:
        swaps += [
            (attention, "on_cpu", lambda x: False),
            (offload, "_to_host", _to_host(allocator)),
            (offload, "_to_device", lambda tensors, device: tuple(x.clone() for x in tensors)),
            *((module, "chunk_rows", _device_rows) for module in (groups, block_sparse)),
            (dispatch, "reference", _Kernels(allocator)),
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


class _Kernels:
    """`reference` as a device has it: a function that is one kernel there makes nothing but its results."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator

    def __getattr__(self, name: str) -> Any:
        function = getattr(reference, name)
        if name not in KERNELS:
            return function

        @wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._allocator.results_only():
                return function(*args, **kwargs)

        return kernel
