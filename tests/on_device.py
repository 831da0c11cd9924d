"""Rules of a device other than the CPU, for tests that run on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from hf_actcompress.reference.table import FUNCTIONS


class OnDevice:
    """Device rules under which the package runs its code for a GPU, with the reference's functions on CPU tensors.

    The code for a GPU must not read values back to the host.
    """

    on_cpu, draws = False, 0

    def function(self, name: str) -> Callable[..., Any]:
        return FUNCTIONS[name]

    def turns(self, starts: range) -> Sequence[int]:
        return starts

    def parts(self, every: list[slice]) -> Iterator[slice]:
        return iter(every)

    def rng_state(self) -> Tensor:
        raise NotImplementedError

    def to_host(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def to_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        raise NotImplementedError
