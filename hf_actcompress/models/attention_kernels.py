"""Which kernel torch's attention takes for a call, and what stock keeps of that call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa

from ..ops.autocast import autocast_dtype
from ..private_apis import fused_attention_choice
from ..records import checkpointed
from ..reference.device_rules import on_cpu


def is_wasteful(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether stock keeps more than q, k, v, output and statistics of a call without a mask.

    Stock repeats k and v for the heads of q if the heads are wider than 256. A GPU has no fused kernel for fewer heads
    of k and v in fp32, and keeps the probabilities. On a CPU stock keeps them if k and v have different widths.
    """
    if query.size(1) != key.size(1):
        if not use_gqa_in_sdpa(None, key, value):
            return True
        # a checkpointed layer keeps them for a short time, and would run attention a third time
        half = (autocast_dtype(query) or query.dtype) in (torch.float16, torch.bfloat16)
        if not half and not on_cpu(query) and not checkpointed():
            return True
    return key.size(-1) != value.size(-1) and on_cpu(query) and not fusable(query, key, value, None, False)


def fusable(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> bool:
    """Whether torch itself would take the CPU's fused kernel for this call."""
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    if query.size(2) <= 1 or (causal and query.size(2) != key.size(2)):
        return False
    if query.size(1) % key.size(1) or key.dtype != query.dtype or value.dtype != query.dtype:
        return False
    groups = query.size(1) // key.size(1)
    # v's heads may be of another width than k's (multi-head latent attention)
    choice = fused_attention_choice(query, _expanded(key, groups), _expanded(value, groups), mask, causal)
    return choice == SDPBackend.FLASH_ATTENTION.value


def _expanded(x: Tensor, groups: int) -> Tensor:
    """x [B, Hkv, S, D] in the shape that the kernel gets, without a copy: the kernel is not run on it."""
    b, h, s, d = x.shape
    return x if groups == 1 else x[:, :1].expand(b, h * groups, s, d)
