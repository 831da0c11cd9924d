"""The temporary memory that kernels allocate while they run, by op: on a CPU, and on a CUDA device.

The backward of flash attention adds up q's gradient in fp32, and makes the gradients of k and v for each head of q
before it adds up those of heads that share k and v. The sources of torch (`flash_attn/flash_api.cpp`) and of the
flash-attn package say so. With heads H of q and K of k, of D features (D' of them in memory: the next multiple of 32 up
to 128, of 64 above it), and S tokens (S' of them: the next multiple of 128) in each of B sequences:

| tensor | bytes | where |
|---|---|---|
| the row sums of the softmax's backward | 4 B H S' | always |
| q's gradient | 4 B H S' D' | not under `use_deterministic_algorithms`, which makes several of these |
| the gradients of k and v by heads of q | 2 x 2 B H S D | H and K differ |

For B sequences of different lengths in one row of T tokens, T + 128 B stands in place of B S'.

The memory-efficient kernel adds up q's gradient in tiles of I x J fp32 numbers with 16 bytes of locks each, and the
gradients of k and v in fp32 where a head is too wide for its registers. torch's headers say so
(`mem_eff_attention/kernel_backward.h`: `workspace_size`, and `kernels/cutlassB.h`: the tiles from compute capability
8.0 on; cards of 8.6 and 8.9 take smaller ones for some heads):

| tensor | bytes | where |
|---|---|---|
| the row sums of the softmax's backward | 4 B H S | always |
| q's gradient | B H ceil(S / I) ceil(D / J) (16 + 4 I J) | always |
| the gradients of k and v | 2 x 4 B H n J up(D, I), n = min(ceil(S / J), 200 / (B H)), at least 1 | 16 bits, D > 128 |

I x J is 64 x 64 up to D = 64; then 128 x 128 up to D = 128 in 16 bits, and 128 x 64 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# from the arguments of a call to the bytes of each tensor
Workspace = Callable[[tuple[Any, ...], dict[str, Any]], Sequence[int]]

# what a flash kernel rounds up to: rows, and features of a head up to so many and above
_ROWS, _NARROW, _FEATURES = 128, 128, (32, 64)


def _index(args: Any, kwargs: Any) -> Sequence[int]:
    # the kernel reads only int64 indices, so others are cast
    narrow = (i for i in args[1] if i is not None and i.dtype not in (torch.int64, torch.bool))
    return [sum(8 * i.numel() for i in narrow)]


def _sum(args: Any, kwargs: Any) -> Sequence[int]:
    # a sum in another dtype casts its input first
    dtype = kwargs.get("dtype")
    return [args[0].numel() * dtype.itemsize if dtype is not None and dtype != args[0].dtype else 0]


def _promotion(args: Any, kwargs: Any) -> Sequence[int]:
    # an operand of another dtype than the result's is cast as a whole; numbers and 0-d tensors cost nothing
    operands = [x for x in args if isinstance(x, Tensor) and x.dim() > 0 and x.dtype != torch.bool]
    if not operands:
        return [0]
    common = reduce(torch.promote_types, (x.dtype for x in operands))
    return [sum(x.numel() * common.itemsize for x in operands if x.dtype != common)]


def _dense_flash_backward(args: Any, kwargs: Any) -> Sequence[int]:
    # q [B, H, S, D], k [B, K, S', D]
    q, k = args[1], args[2]
    batch, heads, rows, features = q.shape
    return _flash(q, k, heads, k.size(1), batch * _up(rows, _ROWS), features)


def _flash_backward(args: Any, kwargs: Any) -> Sequence[int]:
    # q [T, H, D] with the bounds of its sequences, or [B, S, H, D]
    q, k, bounds = args[1], args[2], args[6]
    heads, features = q.shape[-2:]
    apart = bounds is None
    rows = q.size(0) * _up(q.size(1), _ROWS) if apart else q.size(0) + _ROWS * (bounds.numel() - 1)
    return _flash(q, k, heads, k.size(-2), rows, features)


def _flash(q: Tensor, k: Tensor, heads: int, key_heads: int, rows: int, features: int) -> Sequence[int]:
    wide = _up(features, _FEATURES[features > _NARROW])
    sums, gradient = 4 * heads * rows, 4 * heads * rows * wide
    expanded = k.numel() // key_heads * heads * q.itemsize
    return [sums, gradient, *([expanded] * 2 if heads != key_heads else ())]


def _efficient_backward(args: Any, kwargs: Any) -> Sequence[int]:
    # q [B, H, S, D], k [B, H, S', D]
    q, k = args[1], args[2]
    batch, heads, rows, features = q.shape
    half, instances = q.itemsize == 2, batch * heads
    i, j = (64, 64) if features <= 64 else (128, 128) if half and features <= 128 else (128, 64)
    tiles = -(-rows // i) * -(-features // j)
    sizes = [4 * instances * rows, instances * tiles * (16 + 4 * i * j)]
    if half and features > 128:
        splits = max(1, min(-(-k.size(2) // j), 200 // instances))
        sizes += [2 * 4 * instances * splits * j * _up(features, i)]
    return sizes


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_ELEMENTWISE = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")

# not in this table: the scratchpads of matrix products in half precision, about 100 KB whatever the size
CPU_WORKSPACES: dict[Any, Workspace] = {
    aten.index.Tensor: _index,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.where.self: _promotion,
    **{getattr(aten, name).Tensor: _promotion for name in _ELEMENTWISE},
}

CUDA_WORKSPACES: dict[Any, Workspace] = {
    aten._scaled_dot_product_flash_attention_backward.default: _dense_flash_backward,
    aten._flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
