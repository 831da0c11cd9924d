"""The fused kernels of `scaled_dot_product_attention`, called directly, forward and backward.

A Function that calls them keeps only the tensors that they need, and no autograd graph. `fused_kernel` says which of
them torch would choose for a call; it is computed once per kind of call.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from ..private_apis import fused_attention_choice, without_dispatch_modes
from .attention import additive, attention_bwd, attention_fwd, repeat_heads, sum_groups

aten: Any = torch.ops.aten

_CUDA_KERNELS = {SDPBackend.FLASH_ATTENTION.value: "flash", SDPBackend.EFFICIENT_ATTENTION.value: "efficient"}
# torch pads heads for "flash" to a multiple of the first, and rows of masks for "efficient" to one of the second
_HEAD_MULTIPLE, _MASK_MULTIPLE = 8, 16
# a mask -> (its version and the dtype of q), and the tensor that `_aligned` made from it for these
_biases: MutableMapping[Tensor, tuple[tuple[int, torch.dtype], Tensor]] = WeakTensorKeyDictionary()


def dense_attention_fwd(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """out [B, H, S, D], logsumexp, and the seed and offset of dropout's draw (None on a CPU).

    Args:
        kernel: A result of `fused_kernel`.
        q: [B, H, S, D].
        k, v: [B, Hkv, K, D].
        mask: Bool (True: attend) or additive, broadcastable to [B, H, S, K]; None for "flash".
        dropout: Probability of dropping a probability; 0 on a CPU.
        causal: Whether the upper triangle is masked.
        scale: Factor on q k^T; None for D ** -0.5.
    """
    if kernel == "cpu":
        return (*attention_fwd(q, k, v, mask, causal, scale), None, None)
    if kernel == "flash":
        out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
            q, k, v, dropout, causal, False, scale=scale
        )
        return out, lse, seed, offset
    groups = q.size(1) // k.size(1)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = aten._scaled_dot_product_efficient_attention(
        q, repeat_heads(k, groups), repeat_heads(v, groups), _bias(mask, q, k), True, dropout, causal, scale=scale
    )
    return found


def dense_attention_bwd(
    kernel: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    seed: Tensor | None, offset: Tensor | None, dropout: float, causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, shaped like q, k, v."""
    grads: tuple[Tensor, Tensor, Tensor]
    if kernel == "cpu":
        return attention_bwd(dout, q, k, v, out, lse, mask, causal, scale)
    if kernel == "flash":
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.size(2), k.size(2), dropout, causal, seed, offset, scale=scale
        )
        return grads
    groups = q.size(1) // k.size(1)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        dout, q, repeat_heads(k, groups), repeat_heads(v, groups), _bias(mask, q, k), out, lse, seed, offset, dropout,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, sum_groups(dk, groups), sum_groups(dv, groups)


def shared_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask in the form that "efficient" needs; callers with the same mask (the layers of a model) share a tensor.

    It is remembered as long as the mask itself lives.

    Args:
        mask: Bool (True: attend) or additive, [..., S, K].
        dtype: The dtype of q.
    """
    key = mask._version, dtype
    known = _biases.get(mask)
    if known is not None and known[0] == key:
        return known[1]
    found = _aligned(mask, dtype)
    if found is not mask:
        _biases[mask] = key, found
    return found


def _aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask, additive and with aligned rows; the mask itself if it is both."""
    found: Tensor = additive(mask, dtype)
    width, row = found.size(-1), found.stride(-2)
    if width % _MASK_MULTIPLE and (row % _MASK_MULTIPLE or not row):
        found = pad(found, (0, -width % _MASK_MULTIPLE)).narrow(-1, 0, width)
    return found


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask in the form that "efficient" needs, for all heads."""
    if mask is None:
        return None
    return _aligned(mask, q.dtype).expand(q.size(0), q.size(1), q.size(2), k.size(2))


def sdpa_settings() -> tuple[bool, ...]:
    """The user's settings on which the choice of a kernel depends."""
    of: Any = torch.backends.cuda
    return (
        of.flash_sdp_enabled(),
        of.mem_efficient_sdp_enabled(),
        of.math_sdp_enabled(),
        of.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


@lru_cache(maxsize=4096)
def fused_kernel(
    device: torch.device, dtype: torch.dtype, rows: tuple[int, int], heads: tuple[int, int, int, int],
    mask: tuple[torch.Size, torch.dtype] | None, dropout: float, causal: bool, settings: tuple[bool, ...],
) -> str | None:  # fmt: skip
    """The kernel that torch would choose for a call: "cpu", "flash" or "efficient"; None if it is another one.

    Args:
        device: Device of all tensors.
        dtype: Dtype of q, k and v.
        rows: Batch and tokens; there are as many keys as queries.
        heads: Number of heads of q, number of heads of k and v, width of heads of q and k, width of heads of v.
        mask: Shape and dtype of the mask; None without one.
        dropout: Probability of dropping a probability.
        causal: Whether the upper triangle is masked.
        settings: `sdpa_settings()`, on which the answer depends.
    """
    batch, tokens = rows
    of_q, of_kv, width, of_v = heads
    if tokens <= 1 or width != of_v or device.type not in ("cpu", "cuda"):
        return None
    grouped = of_q != of_kv and mask is None and device.type == "cuda"
    keys = of_kv if grouped else of_q
    shape = None if mask is None else mask[0]
    if shape is not None and (len(shape) != 4 or shape[2:] != (tokens, tokens)):
        return None
    if device.type == "cpu":
        # torch's choice does not depend on these sizes, except that a mask may have a batch of one
        batch, tokens = min(batch, 2), 2
        shape = None if shape is None else torch.Size((min(shape[0], 2), shape[1], 2, 2))
    with without_dispatch_modes():
        q = torch.empty(batch, of_q, tokens, width, dtype=dtype, device=device, requires_grad=True)
        k = torch.empty(batch, keys, tokens, width, dtype=dtype, device=device, requires_grad=True)
        given = None if mask is None else torch.empty(shape, dtype=mask[1], device=device)  # type: ignore[arg-type]
        choice = fused_attention_choice(q, k, k, given, causal, dropout, grouped)
    if device.type == "cpu":
        return "cpu" if choice == SDPBackend.FLASH_ATTENTION.value and not dropout else None
    kernel = _CUDA_KERNELS.get(choice)
    return None if kernel == "flash" and width % _HEAD_MULTIPLE else kernel
