"""Compares a kernel with the reference on small tensors, before `auto` uses it on a device for the first time.

A function of one 16-bit number has 65,536 inputs. If it needs stock's bits in a forward, all of them are tried.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor, nn

from ..reference.rng import codecs_undisturbed
from . import lacks_bf16

# a little more than one tile; neither number is a power of two
ROWS, WIDTH = 19, 200
# relative to a result's largest element: four roundings of bf16, the probe's dtype; a wrong kernel is off by more
DTYPE, WITHOUT_BF16, TOLERANCE = torch.bfloat16, torch.float16, 4 * torch.finfo(torch.bfloat16).eps

# dtypes of 16 bits
NARROW = (torch.bfloat16, torch.float16)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# exceptions of a kernel that cannot be compiled or launched
BROKEN = (
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

    It runs the samples that have `row` among their arguments, or all if `row` is None or no sample has it. A module may
    have a test of its own instead: `PROOFS[name](row, device)` returns the same.
    """
    proof = getattr(module, "PROOFS", {}).get(name)
    devices = [device] if device.type in ("cuda", "xpu") else []
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        codecs_undisturbed(),
        torch.autocast(device.type, enabled=False),
    ):
        if proof is not None:
            return proof(row, device)  # type: ignore[no-any-return]
        samples = list(module.SAMPLES[name](device, WITHOUT_BF16 if lacks_bf16(device) else DTYPE, ROWS, WIDTH))
        for args in [args for args in samples if _is_of(row, args)] or samples:
            try:
                ours = list(tensors(getattr(module, name)(*args)))
            except BROKEN as error:
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


def every(dtype: torch.dtype, device: torch.device) -> Tensor:
    """All 65,536 values of a 16-bit dtype, including subnormals, infinities and every NaN."""
    return torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(dtype)


def paired(dtype: torch.dtype, device: torch.device, times: int) -> tuple[Tensor, Tensor]:
    """All values, `times` times, and beside each of them another one: all values again, in a different order each time.

    It uses no random generator, because a probe must not change the numbers that others draw.
    """
    first = torch.arange(1 << 16, dtype=torch.int32, device=device)
    # the factors are odd, so each product permutes the 65,536 values
    others = [first * (40503 + 2 * 7919 * turn) + 12345 * (turn + 1) for turn in range(times)]
    second = torch.cat(others).to(torch.int16).view(dtype)
    return every(dtype, device).repeat(times), second


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements differ in a bit, where all NaNs count as equal; all of them if shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel())
    integer = _INTEGERS[a.itemsize]
    same = (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())
    return int((~same).sum())


def identity(stock: Any) -> Hashable | None:
    """A key that is equal for stock functions which compute the same; None for a function that cannot be identified.

    A module's forward (``partial(type.forward, module)``) is identified by its type: a row of the tables of activations
    holds for all instances. A wrapper is identified by its `function` and by the autocast `dtype` in which it runs it.
    """
    if hasattr(stock, "function"):
        inner = identity(stock.function)
        return None if inner is None else (inner, getattr(stock, "dtype", None))
    if isinstance(stock, partial):
        inner, owner = identity(stock.func), [type(x) for x in stock.args if isinstance(x, nn.Module)]
        if inner is None or len(owner) != len(stock.args) or not all(map(_hashable, stock.keywords.values())):
            return None
        return inner, *owner, *sorted(stock.keywords.items())
    code = getattr(stock, "__code__", None)
    if code is None:
        # a built-in function of torch
        return stock if isinstance(stock, type(torch.relu)) else None
    # the values that a closure holds are not known
    return None if stock.__closure__ or not _hashable(stock.__defaults__) else (code, stock.__defaults__)


def _hashable(x: Any) -> bool:
    return isinstance(x, (type(None), bool, int, float, str)) or (isinstance(x, tuple) and all(map(_hashable, x)))
