"""The contract's cases of attention."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from hf_actcompress import ops
from tests.ops.contract_case import RNG_STATE, Case, Inputs, rand, rows, seeded, size, statistic


def attention_inputs(batch: int, dtype: torch.dtype, kv_heads: int, mask: str) -> Inputs:
    q = rand(batch, 4, 6, 8, dtype=dtype)
    k, v = (rand(batch, kv_heads, 6, 8, dtype=dtype) for _ in range(2))
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None].expand(batch, 1, 6, 6).contiguous()
    if mask == "additive":
        return [q, k, v, torch.zeros(causal.shape, dtype=dtype).masked_fill_(~causal, torch.finfo(dtype).min)]
    return [q, k, v, causal]


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> Tensor:
    groups = q.size(1) // k.size(1)
    b, h, s, d = k.shape
    if groups > 1:
        k, v = (x[:, :, None].expand(b, h, groups, s, d).reshape(b, h * groups, s, d) for x in (k, v))
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask if bias is None else bias)


def fused_attention_cases() -> list[Case]:
    return [
        Case(
            f"fused_{mask}_{kv_heads}",
            lambda q, k, v, mask: ops.fused_attention(q, k, v, mask, False, None),
            sdpa,
            partial(attention_inputs, kv_heads=kv_heads, mask=mask),
            3,
            # and the logsumexp, [B, H, S]
            lambda x: size(x[0], x[1], x[2]) + rows(x[0]) * statistic(x[0]),
            compiles=False,
        )
        for mask in ("bool", "additive")
        for kv_heads in (4, 2)
    ]


def recomputed_attention_cases() -> list[Case]:
    def with_bias(batch: int, dtype: torch.dtype) -> Inputs:
        q, k, v, _ = attention_inputs(batch, dtype, 4, "bool")
        return [q, k, v, None, rand(max(batch, 1), 4, 6, 6, dtype=dtype)]

    dropped = seeded(lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, mask, 0.3))
    masked = partial(attention_inputs, kv_heads=4, mask="bool")

    def kept(x: Inputs) -> int:
        return size(x[0], x[1], x[2]) + RNG_STATE

    return [
        Case("recomputed_bias", partial(ops.recomputed_attention, sdpa), sdpa, with_bias, 3, kept, compiles=False),
        Case(
            "recomputed_grouped", partial(ops.recomputed_attention, sdpa), sdpa,
            partial(attention_inputs, kv_heads=2, mask="bool"), 3, kept, compiles=False,
        ),
        Case(
            "recomputed_dropout",
            seeded(
                partial(
                    ops.recomputed_attention,
                    lambda q, k, v, mask, bias: functional.scaled_dot_product_attention(q, k, v, mask, 0.3),
                )
            ),
            dropped, masked, 3, kept, compiles=False,
        ),
    ]  # fmt: skip
