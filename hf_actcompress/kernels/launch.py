"""Launches of kernels that have been compiled before, without Triton's own search for the compiled code.

For each launch Triton reads its settings from the environment, writes the options out as text and looks for code that
was compiled for such arguments. On the host of an H200 that took some 100 us, while most of these kernels run for 5 to
50 us: in a forward of Llama-3.2-1B the GPU waited for the host. Here one dictionary per kernel finds the code.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

# False: each launch goes through Triton, for tests that count there
enabled = True


class CachedLaunches:
    """A kernel of `triton.jit` that is launched in the same way, ``kernel[grid](*tensors_and_numbers, **constants)``.

    What decides which code Triton compiles is the key: dtypes and alignments of tensors, for integers whether they are
    1 or multiples of 16, the constants and the device.
    """

    def __init__(self, jit: Any) -> None:
        self.jit, self.__name__ = jit, jit.__name__
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = (args[0].device, *map(kind_of, args), *options.items())
        known = self._known.get(key) if enabled else None
        if known is not None:
            compiled, constants = known
            compiled[(*grid, 1, 1)](*args, *constants)
            return
        constants = tuple(options[name] for name in self.jit.arg_names[len(args) :])
        compiled = self.jit[grid](*args, **options)
        # ROCm's code also depends on the sizes of tensors
        if isinstance(compiled, CompiledKernel) and torch.version.hip is None:
            self._known[key] = compiled, constants


def kind_of(x: Any) -> Hashable:
    """What Triton compiles separate code for, of one argument of a kernel."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if type(x) is int:
        return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63
    return type(x)
