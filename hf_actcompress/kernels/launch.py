"""Launches of kernels that have been compiled before, without Triton's own search for the compiled code.

For each launch Triton reads its settings from the environment, writes the options out as text and looks for code that
was compiled for such arguments. On the host of an H200 that took some 100 us, while most of these kernels run for 5 to
50 us: in a forward of Llama-3.2-1B the GPU waited for the host. Here one dictionary per kernel finds the code. NVIDIA's
launcher is given tensors as addresses: for each tensor it would ask the driver where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

# False: each launch goes through Triton, for tests that count there
enabled = True


class Code:
    """Compiled code of a kernel.

    Args:
        compiled: Triton's object.
        constants: The values of the kernel's constants, which the code takes and ignores.
    """

    __slots__ = ("_compiled", "_head", "_run", "constants")

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        self._compiled, self.constants = compiled, constants
        # a machine that compiles for others has nothing that launches
        self._run: Any = None
        self._head: tuple[Any, ...] = ()

    def launch(self, grid: tuple[int, ...], stream: Any, values: Sequence[Any]) -> None:
        """Launch it with numbers, constants, and addresses in the place of tensors; if there is no stream
        (`stream_of`), through Triton and with the tensors."""
        if stream is None:
            self._compiled[(*grid, 1, 1)](*values)
            return
        if self._run is None:
            # this loads the code on the device
            self._run = self._compiled.run
            self._head = (self._compiled.function, self._compiled.packed_metadata, None, None, None)
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        self._run(x, y, z, stream, *self._head, *values)


class CachedLaunches:
    """A kernel of `triton.jit` that is launched in the same way, ``kernel[grid](*tensors_and_numbers, **constants)``.

    What decides which code Triton compiles is the key: dtypes and alignments of tensors, for integers whether they are
    1 or multiples of 16, the constants and the device. (A call that came before makes no such key: `recorded.py`.)
    """

    def __init__(self, jit: Any) -> None:
        self.jit, self.__name__ = jit, jit.__name__
        self._known: dict[Hashable, Code] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        kinds, values = kinds_and_values(args)
        key = (args[0].device, *options.values(), *options, *kinds)
        code = self._known.get(key)
        if _notes.seen is not None:
            _notes.seen.append(None if code is None else (code, grid, args))
        if code is None or not enabled:
            constants = tuple(options[name] for name in self.jit.arg_names[len(args) :])
            compiled = self.jit[grid](*args, **options)
            # ROCm's code also depends on the sizes of tensors
            if isinstance(compiled, CompiledKernel) and torch.version.hip is None:
                self._known[key] = Code(compiled, constants)
            return
        stream = stream_of(args[0].device)
        code.launch(grid, stream, (*(args if stream is None else values), *code.constants))


def stream_of(device: torch.device) -> Any:
    """The current stream of a device, for launches past Triton; None if Triton has to launch.

    A tool that watches launches (Triton's profiler) sets a hook, and wants tensors; launchers of other makers than
    NVIDIA may take no addresses.
    """
    if device.type != "cuda":
        return None
    hook = knobs.runtime.launch_enter_hook
    return None if hook is not None and getattr(hook, "calls", True) else driver.active.get_current_stream(device.index)


class _Notes(threading.local):
    """What a call that is recorded does (`watched.py`)."""

    seen: list[Any] | None = None


_notes = _Notes()


@contextmanager
def noted(seen: list[Any]) -> Iterator[None]:
    """While the block runs in this thread, its launches are appended to `seen`: code, grid and arguments; None for one
    whose code was not compiled before."""
    _notes.seen = seen
    try:
        yield
    finally:
        _notes.seen = None


def kinds_and_values(args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """What Triton compiles separate code for, of the arguments of a kernel; and the arguments, tensors as addresses."""
    kinds: list[Any] = []
    values = list(args)
    for place, x in enumerate(args):
        if type(x) is int:
            kinds.append(("int", x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63))
        elif isinstance(x, Tensor):
            values[place] = address = x.data_ptr()
            kinds += (x.dtype, address % 16 == 0)
        else:
            kinds.append(type(x))
    return kinds, values
