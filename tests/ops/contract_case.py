"""Contract cases: an op, and the stock composition that it must equal. And functions that make their tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.oracle import Function

Inputs = list[Tensor | None]
# the dtypes of the ops' tests
DTYPES = (torch.float32, torch.bfloat16)
RNG_STATE = torch.get_rng_state().numel()


@dataclass(frozen=True)
class Case:
    """An op with its options: ours and stock take the same inputs."""

    id: str
    ours: Function
    stock: Function
    # inputs(batch, dtype)
    inputs: Callable[[int, torch.dtype], Inputs]
    # how many of the inputs, from the first, are activations (the rest are weights and masks)
    activations: int
    # kept(inputs) in bytes, as documented
    kept: Callable[[Inputs], int]
    # dtypes in which law 2 promises bit-equality; in others the error is compared with stock's
    bits: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    gradcheck: bool = True
    # the memory order of the inputs is free
    strided: bool = True
    # if the input with this index (a weight) is frozen, the op does not keep its first input
    weight_only: int | None = None


def rand(*shape: int, dtype: torch.dtype, grad: bool = True) -> Tensor:
    """Values that bf16 holds exactly, so that every dtype sees the same numbers."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_(grad)


def size(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def rows(x: Tensor) -> int:
    return x.numel() // x.size(-1)


def statistic(x: Tensor) -> int:
    """Bytes of one fp32 (or wider) number."""
    return max(x.element_size(), 4)


def seeded(function: Function) -> Function:
    def run(*inputs: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return function(*inputs)

    return run
