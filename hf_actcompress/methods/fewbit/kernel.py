"""Few-bit derivatives: one pass from x to packed codes, and one from codes to gradients.

A code that is the index of a cell of x is the reference's. A code that is f'(x) rounded may differ: f' differs from
torch's in its last bits, so near a border between codes the neighbouring code may result, which is as good. With up to
4 bits such a code is the index of a cell of x, too. Cells are looked up in a table, which is made once, on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...kernels.activation import OPTIONS, constants, derivative, is_fast
from ...kernels.common import POINTWISE_LAUNCH, POINTWISE_TILE, cast, cdiv, on, traced
from ...kernels.groups import as_code, join_bits, nearest_integer, split_bits
from ...kernels.launch import CachedLaunches
from ...reference.bits import packed_bytes
from .kernel_encoding import cells, encoding, known_slopes
from .reference import TWO_VALUED, UNBOUNDED, fewbit_levels, fewbit_stored_bits, row_maximum

_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _cell(x, table_ptr, TABLE: tl.constexpr):
    """The code of x from the table of `kernel_encoding.cells`. NaN is above all borders, as in torch.bucketize."""
    place = tl.minimum(tl.maximum((x - TABLE[0]) * TABLE[1], 0.0), TABLE[2])
    entry = tl.load(table_ptr + tl.where(x == x, place, TABLE[2]).to(tl.int32))
    border = entry.to(tl.int32).to(tl.float32, bitcast=True)
    return ((entry >> 32).to(tl.int32) >> tl.where(x <= border, 0, 8)) & 255


@triton.jit
def _row_factor(scale_ptr, start, count, width, inside, WIDE: tl.constexpr, TILE: tl.constexpr):
    """`scale` of each element's row. WIDE: no row is narrower than a tile, so that a tile has at most two rows."""
    at = tl.arange(0, TILE)[None, :]
    row = start * TILE // width
    # how many elements of that row are in earlier tiles
    passed = (start * TILE - row * width).to(tl.int32)
    if WIDE:
        following = tl.load(scale_ptr + row + 1, mask=(row + 1) * width < count, other=1.0)
        return tl.where(at < width - passed, tl.load(scale_ptr + row), following)
    else:
        return tl.load(scale_ptr + row + (passed + at) // width, mask=inside, other=1.0)


@triton.jit
def _code(x, table_ptr, scale_ptr, start, count, width, inside, MODE: tl.constexpr, TABLE: tl.constexpr,
          KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, FAST: tl.constexpr, WIDE: tl.constexpr,
          TILE: tl.constexpr):  # fmt: skip
    """The code of x. TABLE is what `encoding` returns."""
    if MODE == "cells":
        return _cell(x, table_ptr, TABLE)
    else:
        slope = derivative(x, KIND, A, B, FAST)
        if MODE == "grid":
            # shifted up, so that the number that is rounded is not negative
            place = slope * TABLE[1] + 256.0
            code = nearest_integer(tl.minimum(tl.maximum(place, 0.0), 1024.0)) - 256.0 + TABLE[0]
            return as_code(tl.minimum(tl.maximum(code, 0.0), 255.0))
        elif MODE == "two_valued":
            return (slope != TABLE[0]).to(tl.int32)
        else:
            tl.static_assert(MODE == "scaled")
            scale = _row_factor(scale_ptr, start, count, width, inside, WIDE, TILE)
            place = slope * tl.math.div_rn(1.0, tl.maximum(scale, _TINY))
            # inf * 0 is NaN: take the code of the largest slope, which decodes to inf again
            return as_code(nearest_integer(tl.where(place == place, place, TABLE[0])))


@CachedLaunches
@triton.jit
def _codes_kernel(
    x_ptr, table_ptr, scale_ptr, codes_ptr, count, width, bytes, high_bytes,
    MODE: tl.constexpr, TABLE: tl.constexpr, KIND: tl.constexpr, A: tl.constexpr, B: tl.constexpr, KNOWN: tl.constexpr,
    FAST: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """KNOWN is what `known_slopes` returns. An x whose f' is NaN makes `scale` NaN, if `scale` is one number."""
    start = tl.program_id(0).to(tl.int64)
    at = start * TILE + tl.arange(0, TILE)[None, :]
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    code = _code(x, table_ptr, scale_ptr, start, count, width, inside, MODE, TABLE, KIND, A, B, FAST, WIDE, TILE)
    code = tl.where(inside, code, 0)
    if MODE != "scaled" and MODE != "two_valued":
        lost = (x < KNOWN[0]) | (x > KNOWN[1])
        if KNOWN[2]:
            lost |= x != x
        found = tl.max(tl.where(inside & lost, 1, 0), axis=1)
        # several programs may write `scale`, but all write the same
        tl.store(scale_ptr + found * 0, found * float("nan"), mask=found > 0)
    field: tl.constexpr = 2 if BITS == 3 else BITS
    place = start * (TILE * field // 8) + tl.arange(0, TILE * field // 8)[None, :]
    tl.store(codes_ptr + place, join_bits(code & (2**field - 1), field, 1, TILE), mask=place < bytes)
    if BITS == 3:
        place = start * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
        tl.store(codes_ptr + bytes + place, join_bits(code >> 2, 1, 1, TILE), mask=place < high_bytes)


@CachedLaunches
@triton.jit
def _bwd_kernel(
    dy_ptr, codes_ptr, scale_ptr, levels_ptr, dx_ptr, count, width, bytes, high_bytes,
    FACTOR: tl.constexpr, WIDE: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """FACTOR: what multiplies the levels: "none", "one" number of `scale` for all, or the number of the "row"."""
    start = tl.program_id(0).to(tl.int64)
    at = start * TILE + tl.arange(0, TILE)[None, :]
    inside = at < count
    field: tl.constexpr = 2 if BITS == 3 else BITS
    place = start * (TILE * field // 8) + tl.arange(0, TILE * field // 8)[None, :]
    code = split_bits(tl.load(codes_ptr + place, mask=place < bytes, other=0), field, 1, TILE)
    if BITS == 3:
        place = start * (TILE // 8) + tl.arange(0, TILE // 8)[None, :]
        high = tl.load(codes_ptr + bytes + place, mask=place < high_bytes, other=0)
        code |= split_bits(high, 1, 1, TILE) << 2
    level = tl.load(levels_ptr + code)
    if FACTOR == "one":
        level *= tl.load(scale_ptr)
    elif FACTOR == "row":
        level *= _row_factor(scale_ptr, start, count, width, inside, WIDE, TILE)
    dx = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * level
    tl.store(dx_ptr + at, cast(dx, dx_ptr.dtype.element_ty), mask=inside)


def _is_wide(x: Tensor, kind: str) -> bool:
    return kind in UNBOUNDED and x.dim() > 0 and x.size(-1) >= POINTWISE_TILE


def _field_bytes(x: Tensor, bits: int) -> tuple[int, int]:
    """Bytes of the lower and the upper field of the codes: 3 bits are stored as 2 and 1."""
    return (packed_bytes(x.numel(), 2), packed_bytes(x.numel(), 1)) if bits == 3 else (packed_bytes(x.numel(), bits), 0)


def _fake_codes(x: Tensor, kind: str, options: list[float], bits: int, method: str) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(packed_bytes(x.numel(), fewbit_stored_bits(kind, bits, method)), dtype=torch.uint8)
    shape = (x.shape[:-1] + (1,) if x.dim() else x.shape) if kind in UNBOUNDED else (0 if kind in TWO_VALUED else 1,)
    return codes, x.new_ones(shape, dtype=torch.float32)


@traced(_fake_codes)
def _fewbit_codes(x: Tensor, kind: str, options: list[float], bits: int, method: str) -> tuple[Tensor, Tensor]:
    codes, scale = _fake_codes(x, kind, options, bits, method)
    if kind in UNBOUNDED:
        # the largest slope of each row, 2 relu(x), divided by the largest code
        scale = (2.0 * torch.relu(row_maximum(x).float())).div_(2**bits - 1)
    if x.numel():
        stored = fewbit_stored_bits(kind, bits, method)
        mode, numbers = encoding(kind, tuple(options), bits, method)
        table = cells(kind, tuple(options), bits, method, x.device) if mode == "cells" else x
        low, high = constants(kind, options)
        with on(x):
            _codes_kernel[(cdiv(x.numel(), POINTWISE_TILE),)](
                x.contiguous(), table, scale, codes, x.numel(), x.size(-1) if x.dim() else 1, *_field_bytes(x, stored),
                MODE=mode, TABLE=numbers, KIND=kind, A=low, B=high,
                KNOWN=known_slopes(kind, tuple(options)), FAST=is_fast(x), WIDE=_is_wide(x, kind), BITS=stored,
                **POINTWISE_LAUNCH,
            )  # fmt: skip
    return codes, scale


def fewbit_codes(
    x: Tensor, kind: str, options: tuple[float, ...], bits: int, method: str
) -> tuple[Tensor, Tensor | None]:
    """Packed codes of f'(x), and the factor of their levels: a number per row, one that is 1 or NaN, or None."""
    codes, scale = _fewbit_codes(x, kind, list(options), bits, method)
    return codes, None if kind in TWO_VALUED else scale


@cache
def _levels(kind: str, options: tuple[float, ...], bits: int, method: str, device: torch.device) -> Tensor:
    return torch.tensor(fewbit_levels(kind, options, bits, method), dtype=torch.float32, device=device)


def _fake_bwd(dy: Tensor, *_: Any) -> Tensor:
    return dy.new_empty(dy.shape)


@traced(_fake_bwd)
def _fewbit_bwd(
    dy: Tensor, codes: Tensor, scale: Tensor | None, kind: str, options: list[float], bits: int, method: str
) -> Tensor:
    dx = _fake_bwd(dy, codes, scale, kind, options, bits, method)
    if dy.numel():
        stored = fewbit_stored_bits(kind, bits, method)
        levels = _levels(kind, tuple(options), bits, method, dy.device)
        factor = "none" if scale is None else "row" if kind in UNBOUNDED else "one"
        with on(dy):
            _bwd_kernel[(cdiv(dy.numel(), POINTWISE_TILE),)](
                dy.contiguous(), codes.contiguous(), levels if scale is None else scale.contiguous(), levels, dx,
                dy.numel(), dy.size(-1) if dy.dim() else 1, *_field_bytes(dy, stored),
                FACTOR=factor, WIDE=_is_wide(dy, kind), BITS=stored, **POINTWISE_LAUNCH,
            )  # fmt: skip
    return dx


def fewbit_bwd(
    dy: Tensor, codes: Tensor, scale: Tensor | None, kind: str, options: tuple[float, ...], bits: int, method: str
) -> Tensor:
    """dx = dy * q in dy's dtype, rounded once, where q is the level of each code."""
    return _fewbit_bwd(dy, codes, scale, kind, list(options), bits, method)


def _sample_codes(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    # a few different numbers, whose slopes are not near a border between codes
    x = (torch.randint(-24, 24, (rows, width), device=device) / 4 + 1 / 16).to(dtype)
    # every way to make a code, with every width of codes
    chosen = (
        ("gelu", 1, "steps"), ("gelu_clipped", 2, "steps"), ("tanh", 3, "steps"), ("silu", 2, "relus"),
        ("gelu", 4, "values"), ("silu", 8, "values"), ("relu", 4, "values"), ("relu_squared", 4, "values"),
    )  # fmt: skip
    yield from ((x, kind, OPTIONS.get(kind, ()), bits, method) for kind, bits, method in chosen)


def _sample_bwd(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    dy = torch.randn(rows, width, device=device).to(dtype)
    for kind, bits, method in (("gelu", 1, "steps"), ("silu", 2, "relus"), ("gelu", 3, "steps"), ("silu", 4, "values"),
                               ("mish", 8, "values"), ("relu_squared", 4, "values")):  # fmt: skip
        codes = torch.randint(256, (packed_bytes(dy.numel(), bits),), device=device, dtype=torch.uint8)
        scale = torch.rand(rows, 1, device=device) if kind in UNBOUNDED else torch.ones(1, device=device)
        yield dy, codes, scale, kind, (), bits, method


SAMPLES = {"fewbit_bwd": _sample_bwd, "fewbit_codes": _sample_codes}
