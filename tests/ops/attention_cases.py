"""The contract's cases of attention."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hf_actcompress import ops
from hf_actcompress.reference.sequences import Band, Sequences
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
            # q, k, v, and the logsumexp [B, H, S]
            lambda x: size(x[0], x[1], x[2]) + rows(x[0]) * statistic(x[0]),
        )
        for mask in ("bool", "additive")
        for kv_heads in (4, 2)
    ]


def packed_attention_cases() -> list[Case]:
    """Each row has sequences of 1, 2, 2 and 1 tokens. Stock runs once for each sequence."""
    places = (0, 1, 3, 5, 6)

    def sequences(q: Tensor) -> Sequences:
        starts = [6 * row + place for row in range(q.size(0)) for place in places[:-1]]
        return Sequences(q.size(0), 6, (*starts, 6 * q.size(0)))

    def inputs(batch: int, dtype: torch.dtype, kv_heads: int) -> Inputs:
        q, k, v, _ = attention_inputs(batch, dtype, kv_heads, "bool")
        return [q, k, v, torch.tensor(sequences(q).starts, dtype=torch.int32)]

    def ours(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        return ops.packed_attention(q, k, v, bounds, sequences(q))

    def separate(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
        heads = zip(*(x.split([end - start for start, end in pairwise(places)], 2) for x in (q, k, v)), strict=True)
        causal = [torch.ones(end - start, end - start).tril().bool() for start, end in pairwise(places)]
        out = torch.cat([sdpa(*one, mask) for one, mask in zip(heads, causal, strict=True)], 2)
        # a slope of 1 changes no values. Like attention this keeps its output, so that writing on it raises an error
        return functional.leaky_relu_(out, 1.0)

    return [
        Case(
            f"packed_{kv_heads}", ours, separate, partial(inputs, kv_heads=kv_heads), 3,
            lambda x: size(x[0], x[1], x[2]) + rows(x[0]) * statistic(x[0]),
        )
        for kv_heads in (4, 2)
    ] + [_band_case(causal, kv_heads) for causal, kv_heads in ((True, 4), (False, 2))]  # fmt: skip


def _band_case(causal: bool, kv_heads: int) -> Case:
    """A window of three tokens to one or both sides, with padding in the middle. Stock gets a mask."""

    def inputs(batch: int, dtype: torch.dtype) -> Inputs:
        q, k, v, _ = attention_inputs(batch, dtype, kv_heads, "bool")
        return [q, k, v, torch.tensor([True, True, False, True, True, False]).repeat(batch, 1)]

    def ours(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        return ops.packed_attention(q, k, v, real, Band(q.size(0), 6, causal), window=3)

    def masked(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        seen = torch.ones(6, 6).triu(-2).tril(0 if causal else 2).bool()
        return sdpa(q, k, v, (seen & real[:, None]).unsqueeze(1))

    name = f"band_{'causal' if causal else 'both_sides'}"
    kept = lambda x: size(x[0], x[1], x[2]) + rows(x[0]) * statistic(x[0])  # noqa: E731
    return Case(name, ours, masked, inputs, 3, kept)


def attention_rows_cases() -> list[Case]:
    """Attention with a softcap, a window of three tokens and padding, for some queries at a time or all at once."""

    def inputs(batch: int, dtype: torch.dtype, kv_heads: int) -> Inputs:
        q, k, v, _ = attention_inputs(batch, dtype, kv_heads, "bool")
        return [q, k, v, torch.tensor([True, True, False, True, True, False]).repeat(batch, 1)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
        scores = torch.tanh(q @ k.mT / 3) * 3 + mask
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()

    def whole(q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        seen = torch.ones(6, 6).triu(-2).tril().bool() & real[:, None, None]
        mask = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, torch.finfo(q.dtype).min)
        return attend(q, k, v, mask)

    def ours(q: Tensor, k: Tensor, v: Tensor, real: Tensor, step: int) -> Tensor:
        mask = ops.PackedMask(Band(q.size(0), 6, True), 3, lambda: real, q.device, real, q.dtype)
        return ops.attention_rows(attend, mask, q, k, v, step=step)

    def kept(x: Inputs) -> int:
        return size(x[0], x[1], x[2])

    return [
        Case(
            f"rows_{kv_heads}_{step}", partial(ours, step=step), whole, partial(inputs, kv_heads=kv_heads), 3, kept,
            # sums over several blocks are taken in another order
            bits=(torch.float32, torch.bfloat16) if step == 6 else (),
        )
        for kv_heads, step in ((4, 2), (2, 4), (2, 6))
    ]  # fmt: skip


def recomputed_attention_cases() -> list[Case]:
    def with_bias(batch: int, dtype: torch.dtype) -> Inputs:
        q, k, v, _ = attention_inputs(batch, dtype, 4, "bool")
        return [q, k, v, None, rand(max(batch, 1), 4, 6, 6, dtype=dtype)]

    dropped = seeded(lambda q, k, v, mask: functional.scaled_dot_product_attention(q, k, v, mask, 0.3))
    masked = partial(attention_inputs, kv_heads=4, mask="bool")

    def kept(x: Inputs) -> int:
        return size(x[0], x[1], x[2])

    return [
        Case("recomputed_bias", partial(ops.recomputed_attention, sdpa), sdpa, with_bias, 3, kept),
        Case(
            "recomputed_grouped", partial(ops.recomputed_attention, sdpa), sdpa,
            partial(attention_inputs, kv_heads=2, mask="bool"), 3, kept,
        ),
        Case(
            "recomputed_dropout",
            seeded(
                partial(
                    ops.recomputed_attention,
                    lambda q, k, v, mask, bias: functional.scaled_dot_product_attention(q, k, v, mask, 0.3),
                    draws=True,
                )
            ),
            dropped, masked, 3, lambda x: kept(x) + RNG_STATE,
        ),
    ]  # fmt: skip
