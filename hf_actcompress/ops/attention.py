"""Scaled dot-product attention for the calls in which stock keeps more than q, k, v, the output and its statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..dispatch import implementation
from ..records import applied, load, record_in_order_of, save, stored_exact
from ..reference.sequences import Band, Sequences
from .autocast import SameAutocast, autocast_dtype
from .first_order import once_differentiable
from .heads import keep_heads, keep_output_heads, keep_row_heads, output_codec
from .region import result_in_region

_Attend = Callable[..., Tensor]


class FusedAttentionFunction(torch.autograd.Function):
    """Variants "fused" and "packed": a kernel's forward and backward; keeps what they need, the mask by reference.

    `name` is the name of the kernel's functions, `options` are their arguments after the mask. For packed sequences the
    mask is their bounds.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: tuple[Any, ...],
        is_causal: bool, codec: Codec,
    ) -> Tensor:  # fmt: skip
        forward = implementation(f"{name}_fwd", q)
        out, lse = result_in_region(lambda: forward(q, k, v, mask, *options))
        kept, dropped = keep_heads(q, k, v, None if is_causal else mask, is_causal, codec)
        # the kernel writes [B, S, H, D], which the next linear reads as [B, S, H * D]: one record for both
        out_record = keep_output_heads(out, codec, dropped)
        # a row whose q was dropped has a q of zero now, so its statistic has to be zero, too. Packed kernels have
        # statistics of a shape of their own, which stay whole
        statistics = keep_row_heads(lse, dropped and lse.shape == q.shape[:3])
        save(ctx, *kept, out_record, statistics, stored_exact(mask) if mask is not None else None)
        ctx.name, ctx.options = name, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = load(ctx, dout.transpose(1, 2))
        grads = implementation(f"{ctx.name}_bwd", dout)(dout, q, k, v, out, lse, mask, *ctx.options)
        return (None, *grads, None, None, None, None)


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    *,
    codec: Codec = IDENTITY,
) -> Tensor:
    """Attention through the CPU's fused kernel, without copies of mask or heads.

    Args:
        q: ``[B, H, S, D]``.
        k, v: ``[B, Hkv, K, D]``, H a multiple of Hkv.
        mask: Bool (True: attend) or additive, broadcastable to ``[B, H, S, K]``, or None.
        is_causal: Mask the upper triangle.
        scale: Factor on q k^T, or None for ``D ** -0.5``.
        codec: How q, k, v and the output are stored.

    Returns:
        ``[B, H, S, D]`` with the memory order of ``[B, S, H, D]``.

    Saves:
        q, k, v, the output and its logsumexp; the mask by reference, so that all layers of a model keep one. Stock
        keeps an additive copy of the mask in each layer and, with a mask, k and v repeated to H heads.

    Gradient:
        Exact, bit-equal to stock. The mask gets none.
    """
    dtype = autocast_dtype(q)
    if dtype is not None:
        # autograd casts here: the cast tensors are kept, and the wider ones are freed
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    options = is_causal, scale
    return applied(FusedAttentionFunction, "attention", q, k, v, mask, options, is_causal, codec)


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor | None,
    sequences: Sequences | Band,
    scale: float | None = None,
    *,
    window: int | None = None,
    kernel: str = "pieces",
    codec: Codec = IDENTITY,
) -> Tensor:
    """Attention in which each token sees those before it in its sequence, or those in a band. No T x T mask is made.

    Args:
        q: ``[B, H, T, D]``, of the same dtype as k and v.
        k, v: ``[B, Hkv, T, D]``, H a multiple of Hkv.
        bounds: ``sequences.starts`` on the device, ``[N + 1]`` int32; for a band, which tokens are not padding,
            ``[B, T]`` bool, or None.
        sequences: Where the sequences of the B rows begin and end; or a band, which only "pieces" supports.
        scale: Factor on q k^T, or None for ``D ** -0.5``.
        window: How many keys a query sees to one side, itself included; None: all.
        kernel: "pieces", the CPU's; "flash" or "efficient", CUDA's.
        codec: How q, k, v and the output are stored.

    Returns:
        ``[B, H, T, D]`` with the memory order of ``[B, T, H, D]``.

    Saves:
        q, k, v, the output and its statistics: 4 bytes per token and head (8 in fp64). Stock keeps the mask, and on a
        CPU an additive copy of it in each layer.

    Gradient:
        Exact: that of attention on each sequence alone, and that of attention with a mask.
    """
    options = sequences, window, scale, kernel
    return applied(FusedAttentionFunction, "packed_attention", q, k, v, bounds, options, True, codec)


class RecomputedAttentionFunction(torch.autograd.Function):
    """Variant "recomputed": keeps the inputs and runs the stock call again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        attend: _Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        is_causal: bool,
        codec: Codec,
        draws: bool,
        grad_enabled: bool,
    ) -> Tensor:
        state = stored_exact(implementation("rng_state", q)(q.device)) if draws else None
        kept, _ = keep_heads(q, k, v, mask, is_causal, codec)
        masks = [stored_exact(x) if x is not None else None for x in (mask, bias)]
        save(ctx, *kept, *masks, state)
        ctx.attend = SameAutocast(attend, q)
        # torch chooses its kernel also by whether inputs (the bias, too) require a gradient: make the call as stock
        # makes it, and drop the graph. In the first run of a layer under reentrant checkpointing, a bias may require a
        # gradient while gradients are off
        leaves = _leaves((q, k, v, mask, bias), ctx.needs_input_grad[1:6])

        def compute() -> tuple[Tensor]:
            with torch.set_grad_enabled(grad_enabled):
                return (attend(*leaves).detach(),)

        # a second run of a layer has to draw the same random numbers as the first
        out = (compute() if draws else result_in_region(compute))[0]
        if codec != IDENTITY:
            # the next linear layer keeps the output through the codec; nothing is packed if it keeps nothing
            of_out = output_codec(codec)
            record_in_order_of(out, out if of_out.heads_apart else out.flatten(2), of_out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, state = load(ctx, dout)
        needs = ctx.needs_input_grad[1:6]
        leaves = _leaves(inputs, needs)
        wanted = [x for x, need in zip(leaves, needs, strict=True) if need and x is not None]
        drawn = nullcontext() if state is None else implementation("replayed_rng", dout)(state, dout.device)
        with torch.enable_grad(), drawn:
            out = ctx.attend(*leaves)
            grads = iter(torch.autograd.grad(out, wanted, dout, allow_unused=True))
        found = (next(grads) if need and x is not None else None for x, need in zip(leaves, needs, strict=True))
        return (None, *found, None, None, None, None)


def _leaves(inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    return [x.detach().requires_grad_(need) if x is not None else None for x, need in zip(inputs, needs, strict=True)]


def recomputed_attention(
    attend: _Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    is_causal: bool = False,
    codec: Codec = IDENTITY,
    draws: bool = False,
) -> Tensor:
    """Any attention call. Backward runs it again, so that the tensors which the call saves need not be kept.

    Args:
        attend: The stock call, ``attend(q, k, v, mask, bias) -> out [B, S, H, D]``.
        q, k, v: ``[B, H or Hkv, S or K, D]``.
        mask: Bool or additive mask, or None.
        bias: A position bias that may need a gradient, or None.
        is_causal: Whether the call masks the upper triangle itself: then padding on the right needs no mask.
        codec: How q, k and v are stored. The statistics are recomputed from the stored tensors, so they fit these.
            The next linear layer keeps the output through this codec, too, and uses it for its weight's gradient only.
        draws: Whether the call draws random numbers, as with dropout.

    Returns:
        What ``attend`` returns.

    Saves:
        q, k, v, mask and bias by reference, and the RNG state if the call draws: no probabilities, no per-layer mask,
        no repeated heads.

    Gradient:
        Exact, bit-equal to stock (identity codec): the same torch calls with the same dropout mask.
    """
    grad_enabled = torch.is_grad_enabled()
    return applied(RecomputedAttentionFunction, attend, q, k, v, mask, bias, is_causal, codec, draws, grad_enabled)
