"""torch's own CUDA kernels for attention over sequences of any lengths in one row of tokens. No other package is
needed.

"flash" is the kernel of `torch.nn.attention.varlen`: from compute capability 8.0 on, fp16 and bf16. "efficient" is the
memory-efficient kernel of `scaled_dot_product_attention`: older devices and fp32, too. Neither is used on a device
before it has agreed there with attention in pieces.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ._packed_sdpa import packed_sdpa
from .attention import repeat_heads, sum_groups
from .device_rules import device_rules
from .sequences import Sequences

aten: Any = torch.ops.aten
_log = logging.getLogger(__name__)

KERNELS = ("flash", "efficient")
_CAUSAL_FROM_TOP_LEFT = 1
# the statistics of "efficient" are [N, H, longest], which would be large for one long sequence among many short ones
_MOST_STATISTICS = 4
# a head's width must be a multiple of the first, for whole vectors, and at most the second, which every device supports
_HEAD_MULTIPLE, _WIDEST_HEAD = 8, 256
# tolerance relative to a result's largest element; a wrong kernel is off by more
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """As `packed_attention_fwd`. The statistics are [H, B * T] for "flash", [N, H, longest or more] for "efficient"."""
    rows = [_rows(x) for x in (q, *_heads(kernel, q, k, v))]
    if kernel == "flash":
        out, lse, *_ = aten._flash_attention_forward(
            *rows, bounds, bounds, longest, longest, 0.0, window is None, False, scale=scale, **_sides(window)
        )
    else:
        out, lse, *_ = aten._efficient_attention_forward(
            *(x.unsqueeze(0) for x in rows), None, bounds, bounds, longest, longest, 0.0, _CAUSAL_FROM_TOP_LEFT, True,
            scale=scale, **_size(window),
        )  # fmt: skip
    b, h, t, _ = q.shape
    out, width = out.contiguous(), v.size(-1)
    # the same memory with other strides, and not as a view, because a Function must not return one
    place = out.untyped_storage(), out.storage_offset()
    return out.new_empty(0).set_(*place, (b, h, t, width), (t * h * width, width, h * width, 1)), lse


def backward(
    kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, longest: int,
    window: int | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As `packed_attention_bwd`."""
    rows = [_rows(x) for x in (dout, q, *_heads(kernel, q, k, v), out)]
    # seed and offset of a dropout that is not used
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    if kernel == "flash":
        grads = aten._flash_attention_backward(
            *rows, lse, bounds, bounds, longest, longest, 0.0, window is None, seed, unused, scale=scale,
            **_sides(window),
        )  # fmt: skip
    else:
        dy, *inputs, y = (x.unsqueeze(0) for x in rows)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = aten._efficient_attention_backward(
            dy, *inputs, None, y, bounds, bounds, longest, longest, lse, 0.0, zero, zero, _CAUSAL_FROM_TOP_LEFT, False,
            scale=scale, **_size(window),
        )[:3]  # fmt: skip
    b, _, t, _ = q.shape
    dq, dk, dv = (dx.reshape(b, t, -1, dx.size(-1)).transpose(1, 2) for dx in grads)
    groups = 1 if kernel == "flash" else q.size(1) // k.size(1)
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)


def _rows(x: Tensor) -> Tensor:
    """x [B, H, T, D] as [B * T, H, D]; a view if the memory is [B, T, H, D] or B is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads(kernel: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v in the kernel's form. "flash" shares a head of k and v among heads of q itself."""
    groups = 1 if kernel == "flash" else q.size(1) // k.size(1)
    return repeat_heads(k, groups), repeat_heads(v, groups)


def _sides(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _size(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size": window}


def packed_kernel(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int | None) -> str | None:
    """The CUDA kernel that can be used for this call; None if none can."""
    width, rules = q.size(-1), device_rules()
    estimated = rules is not None and not rules.on_cpu
    if (
        (q.device.type != "cuda" and not estimated)
        or width != v.size(-1)
        or width % _HEAD_MULTIPLE
        or width > _WIDEST_HEAD
    ):
        return None
    few = (len(sequences.starts) - 1) * sequences.longest <= _MOST_STATISTICS * sequences.rows * sequences.tokens
    for kernel in KERNELS if few else KERNELS[:1]:
        if estimated:
            # "efficient" cannot run without data
            return kernel if q.dtype in (torch.float16, torch.bfloat16) else None
        if _agrees(kernel, q.device, q.dtype, width, q.size(1) // k.size(1), window is not None):
            return kernel
    return None


@cache
def _agrees(kernel: str, device: torch.device, dtype: torch.dtype, width: int, groups: int, windowed: bool) -> bool:
    """Whether the kernel runs on a device and agrees there with attention in pieces; it is tried once."""
    if dtype not in _TOLERANCE or (kernel == "flash" and dtype == torch.float32):
        return False
    sequences, window = Sequences(1, 40, (0, 3, 20, 21, 40)), 4 if windowed else None
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, h, 40, width) for h in (2 * groups, 2, 2, 2 * groups)]
    q, k, v, dout = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    with torch.autocast(device.type, enabled=False), torch.enable_grad():
        leaves = tuple(x.float().requires_grad_() for x in (q, k, v))
        expected = packed_sdpa(leaves[0], leaves[1], leaves[2], sequences, window, None)
        grads = torch.autograd.grad(expected, leaves, dout.float().transpose(1, 2))
    try:
        found = _tried(kernel, q, k, v, dout, sequences, window)
    except RuntimeError as error:
        _log.info("attention kernel %s is not used on %s for %s: %s", kernel, device, dtype, error)
        return False
    truth = (expected.detach().transpose(1, 2), *grads)
    limit = _TOLERANCE[dtype]
    return all(bool((a - b).abs().amax() <= limit * b.abs().amax()) for a, b in zip(found, truth, strict=True))


@torch.no_grad()
def _tried(kernel: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, sequences: Sequences, window: int | None) -> Any:
    bounds = torch.tensor(sequences.starts, dtype=torch.int32, device=q.device)
    out, lse = forward(kernel, q, k, v, bounds, sequences.longest, window, None)
    return out, *backward(kernel, dout, q, k, v, out, lse, bounds, sequences.longest, window, None)
