"""What all kernels share: tiles, launch context, accurate math, and the operator that torch.compile sees.

For each of its names a kernel module has the function of `reference/` (same name, same signature) and an entry in its
`SAMPLES`. `SAMPLES[name](device, dtype, rows, width)` yields tuples of arguments that together reach every path of the
kernel. They serve the probe on a new device, ahead-of-time compilation and the tests.
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

from ..compiling import is_compiling

# the reference handles wider rows of a norm
WIDEST_ROW = 16384
# up to this width a row is held in registers, together with sums over the rows; a backward goes through wider rows in
# tiles of WIDE_TILE's rows, columns and warps
WIDEST_SUMS = 8192
WIDE_TILE = (2, 2048, 8)

# (largest width of a row, elements of a tile, warps): 16 elements of each tensor per thread. These are 32 bytes in
# flight per tensor in 16 bits, and leave registers for the other values of a backward
_TILES = ((2048, 2048, 4), (4096, 4096, 8), (8192, 8192, 16), (WIDEST_ROW, 0, 32))
POINTWISE_TILE, POINTWISE_WARPS = 2048, 4

# for kernels whose programs go through the rows with a partial sum each: the warps that a multiprocessor holds at once
# at 128 registers per thread
WARPS_PER_PROCESSOR = 16

DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# passed to every launch: without fused multiply-adds a kernel rounds as the reference and the interpreter do, so the
# tested arithmetic is the one that runs
STRICT = {"enable_fp_fusion": False}
# passed to every launch of a kernel with tiles of POINTWISE_TILE elements
POINTWISE_LAUNCH = {"TILE": POINTWISE_TILE, "num_warps": POINTWISE_WARPS, **STRICT}

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function takes a host longer, and some kernels round up several times."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n >= 1."""
    return 1 << (n - 1).bit_length()


def row_tile(width: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile that holds whole rows of `width` elements."""
    columns = next_power_of_2(max(width, 1))
    for limit, elements, warps in _TILES:
        if columns <= limit:
            return max(elements // columns, 1), columns, warps
    raise AssertionError(f"a row of {width} elements is the reference's")


def programs(x: Tensor, tiles: int, warps: int) -> int:
    """How many programs share `tiles` tiles with a partial sum each. It is fixed per device: deterministic results."""
    if x.is_cuda:
        processors = torch.cuda.get_device_properties(x.device).multi_processor_count
        return max(min(tiles, processors * max(WARPS_PER_PROCESSOR // warps, 1)), 1)
    # a few, so that the interpreter also goes through the loop
    return max(min(tiles, 3), 1)


def as_rows(x: Tensor) -> Tensor:
    """x as [rows, width] with unit stride in a row: a view if possible (half of a projection), otherwise a copy."""
    if x.dim() == 0 or x.stride(-1) != 1:
        x = x.contiguous()
    width = x.size(-1) if x.dim() else 1
    rows = x.numel() // width if width else 0
    try:
        return x.view(rows, width)
    except RuntimeError:
        return x.contiguous().view(rows, width)


def pointwise_layout(*tensors: Tensor) -> tuple[list[Tensor], int, int]:
    """The tensors (of one shape) as rows, and the numbers of rows and columns; if all are dense, one long row."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors], 1, tensors[0].numel()
    matrices = [as_rows(x) for x in tensors]
    return matrices, matrices[0].size(0), matrices[0].size(1)


def on(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which launches go to x's device and its current stream."""
    if x.is_xpu:
        return torch.xpu.device_of(x)
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def traced(
    fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a launcher an operator of torch's library while a graph is traced; in eager mode it stays a plain call.

    `fake` gives shapes and dtypes of the results; `mutates` names the arguments that are written.
    """

    def wrap(launch: Callable[..., Any]) -> Callable[..., Any]:
        operator = torch.library.custom_op(
            f"hf_actcompress::{launch.__name__.strip('_')}", launch, mutates_args=mutates
        )
        operator.register_fake(fake)

        @functools.wraps(launch)
        def call(*args: Any) -> Any:
            return operator(*args) if is_compiling() else launch(*args)

        return call

    return wrap


@triton.jit
def cast(x, dtype: tl.constexpr):
    """fp32 x rounded to dtype, to nearest even, as a last step. The interpreter's own cast to bf16 truncates."""
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


# FAST is for results of 16 bits. PTX's approximations are off by a few fp32 roundings, which the result's rounding
# hides. Otherwise functions are accurate to the last bit or two, as torch's are. The interpreter has no libdevice, and
# its fp32 functions are less accurate than either, so it computes in fp64.


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
    """tanh(x). Near 0 it is a polynomial (relative error 1e-9), because small values would lose digits."""
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
    """log(1 + x) for x >= 0."""
    if INTERPRETED:
        # Kahan's formula
        wide = x.to(tl.float64)
        u = 1.0 + wide
        return tl.where(u == 1.0, wide, tl.log(u) * (wide / tl.where(u == 1.0, 1.0, u - 1.0))).to(tl.float32)
    else:
        return libdevice.log1p(x)
