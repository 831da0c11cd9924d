"""Linear attention with a recurrent state: backward computes its intermediate tensors again, a segment at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autocast import SameAutocast
from .first_order import once_differentiable
from .snapshot import alias

# (inputs [B, n, ...] of some tokens, the state before them or None for the first) -> (output, the state after them)
_Rule = Callable[..., tuple[Tensor, Tensor]]


class LinearAttentionFunction(torch.autograd.Function):
    """Variant "segments": keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, rule: _Rule, step: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.rule, ctx.step = SameAutocast(rule, inputs[0]), step
        ctx.set_materialize_grads(False)
        # all tokens at once: in segments the last bits of products may differ
        return rule(*inputs, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        grads: list[Tensor | None] = [None] * len(inputs)
        # all segments, also of inputs without data, because backward holds one more state for each segment
        parts = [slice(start, start + ctx.step) for start in range(0, inputs[0].size(1), ctx.step)]
        before: list[Tensor | None] = [None]
        for part in parts[:-1]:
            before.append(ctx.rule(*(x[:, part] for x in inputs), before[-1])[1])
        for part in reversed(parts):
            state = before.pop()
            leaves = [alias(x[:, part], wanted) for x, wanted in zip(inputs, needed, strict=True)]
            start = None if state is None else alias(state, True)
            with torch.enable_grad():
                found, after = ctx.rule(*leaves, start)
            pairs = (found, None if dout is None else dout[:, part]), (after, dstate)
            given = [(y, dy) for y, dy in pairs if dy is not None]
            wanted = [x for x in (*leaves, start) if x is not None and x.requires_grad]
            ys, dys = zip(*given, strict=True)
            results = iter(torch.autograd.grad(ys, wanted, dys, allow_unused=True))
            del found, after, pairs, given, ys
            for i, x in enumerate(inputs):
                if needed[i] and (result := next(results)) is not None:
                    dx = torch.zeros_like(x) if (known := grads[i]) is None else known
                    dx[:, part] = result
                    grads[i] = dx
            dstate = None if start is None else next(results)
        return None, None, *grads


def linear_attention(rule: _Rule, step: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention over tokens, whose backward processes `step` tokens at a time.

    Args:
        rule: Stock's code. It gets some tokens of the inputs and the state before them, and returns their output and
            the state after them. All tokens at once and one segment after the other must give the same results.
        step: Tokens of a segment.
        inputs: ``[B, T, ...]``: queries, keys, values, decays and other tensors with one entry per token.

    Returns:
        The output ``[B, T, ...]``, and the last state.

    Saves:
        The inputs (stock: all intermediate tensors of the rule, for all tokens).

    Gradient:
        Exact, first order only: backward runs stock's own ops on the segments twice, for the states and for gradients.
    """
    out: tuple[Tensor, Tensor] = LinearAttentionFunction.apply(rule, step, *inputs)  # type: ignore[no-untyped-call]
    return out
