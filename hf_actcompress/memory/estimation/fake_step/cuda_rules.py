"""A table of rules for what a CUDA device keeps where a CPU keeps something else. So an estimate for a CUDA device
needs neither the device nor a build of torch for it.

| call | a CPU keeps | a CUDA device keeps | rule |
|---|---|---|---|
| dropout | the scaled mask, in x's dtype | a mask of 1 byte per element | the fused `native_dropout` |
| attention in fp16 or bf16, no mask | with dropout the probabilities | q, k, v, out, logsumexp | flash |
| the same with a mask, or in fp32 | likewise | likewise, and the mask in q's dtype, per call | memory-efficient |
| the same in fp32 with fewer heads of k and v | q, k, v, out, logsumexp | the probabilities | math |
| the same with a mask whose last axis is expanded | likewise | the probabilities | math |
| loss of 16-bit logits, autocast | log-probabilities in fp32 | also a copy in 16 bits | `_cross_entropy` |
| layer_norm | mean and rstd in x's dtype | both in fp32 | `IN_FP32` |
| any allocation | its size | a multiple of 512 bytes | `BLOCK` |

Attention is `scaled_dot_product_attention`. Grouped heads, causality and dropout of a flash call keep nothing more;
what its backward makes for a while is in `workspaces.py`. Head sizes above 256 go to the memory-efficient kernel.
cuDNN's attention, which torch prefers on no device by default, keeps what flash keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .masks import SEEN, KnownMasks

aten = torch.ops.aten

# bytes of the smallest block of CUDA's caching allocator
BLOCK = 512
# op -> the results that a CUDA device has in fp32: mean and rstd
IN_FP32 = {aten.native_layer_norm.default: (1, 2)}
# a mask is padded to a multiple of this many keys
_MASK_ALIGNMENT = 16
_FLASH_HEAD = 256


class CudaCalls(TorchFunctionMode):
    """The CUDA ops for a model that a compiler traces. Masks get no values here: the compiled code makes them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


class CudaRules(KnownMasks):
    """Replaces calls on fake tensors that a CPU composes of several ops by CUDA's fused ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SEEN:
            return super().__torch_function__(func, types, args, kwargs)
        return _FUSED.get(func, func)(*args, **(kwargs or {}))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        # autocast casts before torch chooses a kernel, and the kernels called here are below autocast
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (x.to(dtype) for x in (query, key, value))
        attn_mask = attn_mask.to(dtype) if attn_mask is not None and attn_mask.is_floating_point() else attn_mask
    grouped = query.size(-3) != key.size(-3)
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and attn_mask is None and query.size(-1) <= _FLASH_HEAD:
        flash = aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]  # type: ignore[no-any-return]
    if grouped or (attn_mask is not None and attn_mask.stride(-1) != 1):
        # called by its own name, because `sdpa_kernel` would choose for all threads of the process
        math = aten._scaled_dot_product_attention_math
        mask = None if attn_mask is None else _additive(attn_mask, query.dtype)
        return math(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]
    bias = _bias(attn_mask, query, key)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The additive mask that torch makes in each call, [B, H, S, K], as a view of memory whose rows are padded."""
    if mask is None:
        return None
    mask = _additive(mask, query.dtype)
    keys = mask.size(-1)
    padded = -(-keys // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    if padded != keys:
        mask = functional.pad(mask, (0, padded - keys))[..., :keys]
    return mask.expand(query.size(0), query.size(-3), query.size(-2), key.size(-2))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _cross_entropy(input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Tensor:
    """Autocast casts the log-probabilities for the loss, not the logits.

    Class probabilities and smoothed labels are left to torch, and a patched head's logits to their own function.
    """
    half = torch.is_autocast_enabled("cpu") and input.dtype in (torch.float16, torch.bfloat16)
    indices = input.dim() > 1 and not target.is_floating_point()
    if not (half and indices) or options.get("label_smoothing") or getattr(input, "deferred", False):
        return functional.cross_entropy(input, target, weight, **options)
    options.pop("label_smoothing", None)
    with torch.autocast("cpu", enabled=False):
        log_probabilities = torch.log_softmax(input, 1)
        return functional.nll_loss(log_probabilities.float(), target, weight, **options)


# what is replaced -> what a CUDA device runs
_FUSED = {
    functional.cross_entropy: _cross_entropy,
    functional.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
}
