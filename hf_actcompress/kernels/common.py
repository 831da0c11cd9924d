"""What every kernel shares: tiles, launch context, accurate math, and the operator that torch.compile sees.

A kernel module offers, for each of its names, the function of `reference/` (same name, same signature) and a row in its
own `SAMPLES`: `SAMPLES[name](device, dtype, rows, width)` yields argument tuples that between them reach every path of
the kernel, for the probe on a new device, for ahead-of-time compilation and for the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

# wider rows of a norm are the reference's
WIDEST_ROW = 16384
# a row lies in registers, up to this width also beside sums over the rows; a backward walks wider ones in tiles of so
# many rows and columns, by so many warps
WIDEST_SUMS = 8192
WIDE_TILE = (2, 2048, 8)

# elements of a tile and warps that share it, by the width of a row: 16 elements of each tensor per thread, which are 32
# bytes in flight of each in 16 bits and leave room for what a backward holds beside them
_TILES = ((2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (WIDEST_ROW, 0, 32))
POINTWISE_TILE, POINTWISE_WARPS = 2048, 4

# of programs that walk over the rows, each with a row of its own in the buffer of partial sums: what a multiprocessor
# holds at once at 128 registers per thread
WARPS_PER_PROCESSOR = 16

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# given to every launch: without fused multiply-adds a kernel rounds as the reference and the interpreter do, and what
# was tested there is what runs
STRICT = {"enable_fp_fusion": False}

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def row_tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile that holds whole rows of `width` elements."""
    columns = triton.next_power_of_2(max(width, 1))
    for limit, elements, warps in _TILES:
        if columns <= limit:
            return max(elements // columns, 1), columns, warps
    raise AssertionError(f"a row of {width} elements is the reference's")


def programs(x: Tensor, tiles: int, warps: int) -> int:
    """How many programs share `tiles` tiles where each keeps a partial sum; fixed for a device, so deterministic."""
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        return max(min(tiles, processors * max(WARPS_PER_PROCESSOR // warps, 1)), 1)
    # few, so that the interpreter walks the loop
    return max(min(tiles, 3), 1)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, width] with unit stride along a row: a view where there is one (half a projection), else a copy."""
    if x.dim() == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    width = x.size(-1) if x.dim() else 1
    rows = x.numel() // width if width else 0
    try:
        return x.view(rows, width)
    except RuntimeError:
        return x.contiguous().view(rows, width)


def pointwise_layout(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """The tensors (of one shape) as rows, and how many rows and columns to walk: one long row if all are dense."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors], 1, tensors[0].numel()
    matrices = [as_rows(x) for x in tensors]
    return matrices, matrices[0].size(0), matrices[0].size(1)


def on(x: Tensor) -> AbstractContextManager[Any]:
    """Launches inside go to x's device and to its current stream."""
    if x.is_xpu:
        return torch.xpu.device_of(x)
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def traced(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a launcher an operator of torch's library while a graph is traced, and leave it a plain call in eager mode.

    `fake` gives shapes and dtypes of the results; `mutates` names the arguments that are written. The operator is the
    attribute `operator`.
    """

    def wrap(launch: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(
            f"hf_actcompress::{launch.__name__.strip('_')}", launch, mutates_args=mutates
        )
        operator.register_fake(fake)

        @functools.wraps(launch)
        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() else launch(*args)

        call.operator = operator  # type: ignore[attr-defined]
        return call

    return wrap


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 x to dtype, to nearest even. A kernel ends with this; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def widened(x):
    """x in fp32. The interpreter's own cast of bf16 loses subnormals."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


# FAST is for results of 16 bits: PTX's approximations are off by a few roundings of fp32, which are none of theirs.
# Otherwise accurate to the last bit or two, as torch's own. The interpreter has no libdevice, and in fp32 it is worse
# than either; it computes in fp64.


@triton.jit
def exp(x, FAST: tl.constexpr):
    if INTERPRETED:
        return tl.exp(x.to(tl.float64)).to(tl.float32)
    elif FAST:
        return tl.exp(x)
    else:
        return libdevice.exp(x)


@triton.jit
def divide(x, y, FAST: tl.constexpr):
    if FAST:
        return x / y
    else:
        return tl.math.div_rn(x, y)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    return divide(1.0, 1.0 + exp(-x, FAST), FAST)


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """Near 0 by a polynomial (relative error 1e-9), which keeps the small values' digits."""
    if FAST:
        return 2.0 * sigmoid(2.0 * x, FAST) - 1.0
    else:
        s = x * x
        p = -0.33333316 + s * (0.13332586 + s * (-0.0538523 + s * (0.021071635 + s * -0.006274173)))
        away = 1.0 - divide(2.0, exp(2.0 * tl.abs(x), FAST) + 1.0, FAST)
        return tl.where(tl.abs(x) < 0.55, x + x * s * p, tl.where(x < 0.0, -away, away))


@triton.jit
def expm1(x):
    if INTERPRETED:
        wide = x.to(tl.float64)
        near = wide * (1.0 + wide * (0.5 + wide * (1.0 / 6.0)))
        return tl.where(tl.abs(x) < 1e-4, near, tl.exp(wide) - 1.0).to(tl.float32)
    else:
        return libdevice.expm1(x)


@triton.jit
def log1p(x):
    """For x >= 0."""
    if INTERPRETED:
        # Kahan's
        wide = x.to(tl.float64)
        u = 1.0 + wide
        return tl.where(u == 1.0, wide, tl.log(u) * (wide / tl.where(u == 1.0, 1.0, u - 1.0))).to(tl.float32)
    else:
        return libdevice.log1p(x)
