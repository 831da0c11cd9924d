"""A kernel against the reference on small tensors, before `auto` trusts it on a device that nobody has tested."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

from ..reference.rng import codecs_undisturbed
from . import lacks_bf16

# a tile and a bit, neither a power of two
ROWS, WIDTH = 19, 200
# relative to a result's largest element: four roundings of bf16, in which the probe runs; a wrong kernel is off by more
DTYPE, WITHOUT_BF16, TOLERANCE = torch.bfloat16, torch.float16, 4 * torch.finfo(torch.bfloat16).eps

# what a kernel that cannot be compiled or launched raises
_BROKEN = (
    triton.errors.TritonError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, ImportError,
    OSError, NotImplementedError, AssertionError, subprocess.SubprocessError,
)  # fmt: skip


def disagreement(
    name: str,
    row: str | None,
    module: ModuleType,
    specification: Callable[..., Any],
    device: torch.device,
    bitwise: bool,
) -> str | None:
    """What is wrong with `module`'s kernel `name` on a device; None if it agrees with `specification`.

    For the samples that have `row` among their arguments; for all, if it is None or none has it.
    """
    devices = [device] if device.type == "cuda" else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices),
        codecs_undisturbed(),
        torch.autocast(device.type, enabled=False),
    ):
        samples = list(module.SAMPLES[name](device, WITHOUT_BF16 if lacks_bf16(device) else DTYPE, ROWS, WIDTH))
        for args in [args for args in samples if _is_of(row, args)] or samples:
            try:
                ours = list(tensors(getattr(module, name)(*args)))
            except _BROKEN as error:
                return f"it does not run: {type(error).__name__}: {error}"
            expected = list(tensors(specification(*args)))
            if len(ours) != len(expected) or any(not agree(a, b, bitwise) for a, b in zip(ours, expected, strict=True)):
                options = [arg for arg in args if not isinstance(arg, Tensor)]
                return f"it disagrees with the reference (options {options})"
    return None


def _is_of(row: str | None, args: tuple[Any, ...]) -> bool:
    return row is None or any(isinstance(arg, str) and arg == row for arg in args)


def tensors(result: Any) -> Iterator[Tensor]:
    """The tensors of a function's result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from tensors(part)


def agree(a: Tensor, b: Tensor, bitwise: bool) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if bitwise or not b.is_floating_point() or b.itemsize == 1:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if b.dim() else torch.equal(a, b)
    wide_a, wide_b = a.double(), b.double()
    return bool(((wide_a - wide_b).abs() <= TOLERANCE * wide_b.abs().max()).all())
