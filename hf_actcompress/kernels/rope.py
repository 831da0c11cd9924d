"""Rotary position embeddings: forward and backward, each in one pass, bit-equal to the reference on the same device.

A program handles some heads of one token, and reads the token's angles once. All tensors are read and written in place,
whatever their strides. y and dx have the memory order of x and dy, as torch's elementwise ops give it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import rope as reference
from .common import DTYPES, STRICT, cast, cdiv, next_power_of_2, on, traced
from .launch import CachedLaunches

# the widest half of a head; the reference handles wider ones
WIDEST_HALF = 2048
# elements of a tile of half heads, and of a thread (16 bytes in 16 bits)
_TILE, _PER_THREAD = 1024, 8


@CachedLaunches
@triton.jit
def _rope_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, tokens, heads, half, tiles,
    x_batch, x_head, x_token, x_col, y_batch, y_head, y_token, y_col,
    cos_batch, cos_token, cos_col, sin_batch, sin_token, sin_col,
    PRODUCT: tl.constexpr, BACKWARD: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x, y [B, heads, tokens, 2 * half]; cos, sin [B, 1, tokens, 2 * half]. PRODUCT: stock's dtype of the products.

    Forward: y = (x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2); backward, x being dy: (x1 * cos1 + x2 * sin2,
    x2 * cos2 - x1 * sin1).
    """
    row = tl.program_id(0) // tiles
    batch, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    head = ((tl.program_id(0) % tiles) * R + tl.arange(0, R)).to(tl.int64)[:, None]
    # Angles have addresses [R, C], too, although all heads have the same ones. As [1, C] they have as many elements as
    # a small tile has threads: each thread reads one, and the threads pass them to each other through shared memory.
    col = tl.broadcast_to(tl.arange(0, C)[None, :], [R, C])
    mask = (head < heads) & (col < half)
    # added before the columns, so that both halves share the result
    cos_ptr += batch * cos_batch + token * cos_token
    sin_ptr += batch * sin_batch + token * sin_token
    cos1 = tl.load(cos_ptr + col * cos_col, mask=mask).to(tl.float32)
    cos2 = tl.load(cos_ptr + (half + col) * cos_col, mask=mask).to(tl.float32)
    sin1 = tl.load(sin_ptr + col * sin_col, mask=mask).to(tl.float32)
    sin2 = tl.load(sin_ptr + (half + col) * sin_col, mask=mask).to(tl.float32)
    x_ptr += batch * x_batch + token * x_token
    x1 = tl.load(x_ptr + head * x_head + col * x_col, mask=mask).to(tl.float32)
    x2 = tl.load(x_ptr + head * x_head + (half + col) * x_col, mask=mask).to(tl.float32)
    if BACKWARD:
        turned1, turned2 = x2 * sin2, x1 * sin1
        sign = -1.0
    else:
        turned1, turned2 = x2 * sin1, x1 * sin2
        sign = 1.0
    y1 = cast(x1 * cos1, PRODUCT).to(tl.float32) - sign * cast(turned1, PRODUCT).to(tl.float32)
    y2 = cast(x2 * cos2, PRODUCT).to(tl.float32) + sign * cast(turned2, PRODUCT).to(tl.float32)
    y_ptr += batch * y_batch + token * y_token
    tl.store(y_ptr + head * y_head + col * y_col, cast(y1, y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptr + head * y_head + (half + col) * y_col, cast(y2, y_ptr.dtype.element_ty), mask=mask)


def _fake(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
    # for an x that is not dense, the strides of a dense tensor with the same order
    return torch.empty_like(x, dtype=dtype)


@traced(_fake)
def _rope(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, backward: bool) -> Tensor:
    y = _fake(x, cos, sin, dtype, backward)
    if x.numel() == 0:
        return y
    cos, sin = cos.expand(x.shape), sin.expand(x.shape)
    views = [x, y, cos, sin]
    # the heads' dimension is the one on which angles do not depend; the tensors become [B, H, S, D]
    if _heads(cos, sin) == 2:
        views = [view.transpose(1, 2) for view in views]
    (batches, heads, tokens), half = views[0].shape[:3], x.size(-1) // 2
    C = next_power_of_2(half)
    R = min(next_power_of_2(heads), max(_TILE // C, 1))
    tiles = cdiv(heads, R)
    strides = [stride for view in views[:2] for stride in view.stride()]
    strides += [view.stride(i) for view in views[2:] for i in (0, 2, 3)]
    with on(x):
        _rope_kernel[(batches * tokens * tiles,)](
            x, cos, sin, y, tokens, heads, half, tiles, *strides,
            PRODUCT=DTYPES[dtype], BACKWARD=backward, R=R, C=C,
            num_warps=min(max(R * C // (32 * _PER_THREAD), 1), 8), **STRICT,
        )  # fmt: skip
    return y


def _heads(cos: Tensor, sin: Tensor) -> int | None:
    """The dimension of the heads, 1 or 2; None if angles depend on both. cos and sin are expanded to x's shape."""
    fixed = (i for i in (1, 2) if all(a.stride(i) == 0 or a.size(i) == 1 for a in (cos, sin)))
    return next(fixed, None)


def _is_ours(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes x: four dimensions, an even head, angles of one dtype, and no result wider than x."""
    if x.dim() != 4 or x.size(-1) % 2 or x.size(-1) > 2 * WIDEST_HALF or cos.dtype != sin.dtype:
        return False
    if any(angles.dim() != 4 or angles.size(-1) != x.size(-1) for angles in (cos, sin)):
        return False
    fits = all(n in (1, m) for angles in (cos, sin) for n, m in zip(angles.shape, x.shape, strict=True))
    dtypes = {x.dtype, cos.dtype} <= DTYPES.keys()
    return fits and dtypes and _heads(cos.expand(x.shape), sin.expand(x.shape)) is not None


def rope_fwd(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y like x [B, H, S, D], in the wider dtype of x and angles; cos and sin broadcast to x ([B or 1, 1, S, D])."""
    if not _is_ours(x, cos, sin):
        return reference.rope_fwd(x, cos, sin)
    return _rope(x, cos, sin, torch.promote_types(x.dtype, cos.dtype), False)


def rope_bwd(dy: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """dx like dy [B, H, S, D], in `dtype`, which is x's. Each product is rounded to it, and then their sum."""
    # products are rounded once, so dy has x's dtype or fp32
    if not _is_ours(dy, cos, sin) or dtype not in DTYPES or dy.dtype not in (dtype, torch.float32):
        return reference.rope_bwd(dy, cos, sin, dtype)
    return _rope(dy, cos, sin, dtype, True)


def _samples(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> Iterator[tuple[Any, ...]]:
    """Heads before tokens and after them; angles for all sequences and for each one, in x's dtype and in fp32."""
    size = 128 if width % 128 == 0 else max(width // 8 * 2, 2)
    heads = max(width // size, 1)
    for batch, dim, angles_dtype in ((1, 1, dtype), (2, 2, torch.float32)):
        x = torch.randn(batch, rows, heads, size, device=device).to(dtype)
        angles = 3 * torch.randn(batch, rows, size, device=device)
        cos, sin = (f(angles).to(angles_dtype).unsqueeze(dim) for f in (torch.cos, torch.sin))
        yield (x.transpose(1, 2) if dim == 1 else x), cos, sin


def _sample_bwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for x, cos, sin in _samples(*sizes):
        yield torch.randn_like(x, dtype=torch.promote_types(x.dtype, cos.dtype)), cos, sin, x.dtype


SAMPLES = {"rope_fwd": _samples, "rope_bwd": _sample_bwd}
