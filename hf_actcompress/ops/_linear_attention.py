"""Linear attention with a recurrent state: backward computes its intermediate tensors again, a segment at a time.

In the graph of a layer it is one node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compiling import is_traced_plan
from ..private_apis import above_autograd, without_dispatch_modes
from .autocast import autocast_dtype
from .first_order import once_differentiable
from .nodes import node
from .snapshot import alias

# (inputs [B, n, ...] of some tokens, the state before them or None for the first) -> (output, the state after them)
_Rule = Callable[..., tuple[Tensor, Tensor]]


class _InSegments(NamedTuple):
    """A rule, which always runs under the autocast of the call that named it, and how many tokens a segment has."""

    rule: _Rule
    step: int
    device: str
    autocast: torch.dtype | None

    def __call__(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device, self.autocast, enabled=self.autocast is not None, cache_enabled=False):
            return self.rule(*inputs)


# what is computed in segments, which nodes name by their place here
_known: list[_InSegments] = []


def _run(inputs: list[Tensor], place: int) -> tuple[Tensor, Tensor]:
    # all tokens at once: in segments the last bits of products may differ
    out, state = _known[place](*inputs, None)
    return out.contiguous(), state.contiguous()


def _run_backward(
    inputs: list[Tensor], dout: Tensor | None, dstate: Tensor | None, needed: list[bool], place: int
) -> list[Tensor]:
    rule, grads = _known[place], _like_inputs(inputs, dout, dstate, needed, place)
    # all segments, also of inputs without data, because backward holds one more state for each segment
    parts = [slice(start, start + rule.step) for start in range(0, inputs[0].size(1), rule.step)]
    before: list[Tensor | None] = [None]
    with torch.no_grad():
        for part in parts[:-1]:
            before.append(rule(*(x[:, part] for x in inputs), before[-1])[1])
    for part in reversed(parts):
        state = before.pop()
        leaves = [alias(x[:, part], wanted) for x, wanted in zip(inputs, needed, strict=True)]
        start = None if state is None else alias(state, True)
        with above_autograd(), torch.enable_grad():
            found, after = rule(*leaves, start)
            pairs = (found, None if dout is None else dout[:, part]), (after, dstate)
            given = [(y, dy) for y, dy in pairs if dy is not None]
            wanted = [x for x in (*leaves, start) if x is not None and x.requires_grad]
            ys, dys = zip(*given, strict=True)
            results = iter(torch.autograd.grad(ys, wanted, dys, allow_unused=True))
        del found, after, pairs, given, ys
        for dx in grads:
            result = next(results)
            dx[:, part] = 0 if result is None else result
        dstate = None if start is None else next(results)
    return grads


def _like_outputs(
    inputs: list[Tensor], sizes: list[int], of_output: torch.dtype, of_state: torch.dtype, *_: Any
) -> tuple[Tensor, Tensor]:
    x, of_token = inputs[0], len(inputs[0].shape) - 2
    out = x.new_empty((x.size(0), x.size(1), *sizes[:of_token]), dtype=of_output)
    return out, x.new_empty((x.size(0), *sizes[of_token:]), dtype=of_state)


def _like_inputs(inputs: list[Tensor], dout: Any, dstate: Any, needed: list[bool], place: int) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format) for x, n in zip(inputs, needed, strict=True) if n
    ]


SEGMENTS = node(
    "linear_attention(Tensor[] inputs, int[] sizes, ScalarType of_output, ScalarType of_state, int place)"
    " -> (Tensor, Tensor)",
    _like_outputs,
    pointwise=False,
)(lambda inputs, sizes, of_output, of_state, place: _run(inputs, place))
SEGMENTS_BWD = node(
    "linear_attention_bwd(Tensor[] inputs, Tensor? dout, Tensor? dstate, bool[] needed, int place) -> Tensor[]",
    _like_inputs,
    pointwise=False,
)(_run_backward)


class LinearAttentionFunction(torch.autograd.Function):
    """Variant "segments": keeps its inputs."""

    @staticmethod
    def forward(ctx: Any, place: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        ctx.place = place
        ctx.set_materialize_grads(False)
        if not is_traced_plan():
            return _run(list(inputs), place)
        found: tuple[Tensor, Tensor] = SEGMENTS(list(inputs), *_sizes(inputs, place), place)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = list(ctx.needs_input_grad[1:])
        run = SEGMENTS_BWD if is_traced_plan() else _run_backward
        found = iter(run(list(ctx.saved_tensors), dout, dstate, needed, ctx.place))
        return None, *(next(found) if need else None for need in needed)


def _sizes(inputs: tuple[Tensor, ...], place: int) -> tuple[list[int], torch.dtype, torch.dtype]:
    """The sizes of one token's output and of a state, one after the other, and their dtypes."""
    with without_dispatch_modes():
        out, state = _known[place](*(x.new_zeros((1, 1, *x.shape[2:])) for x in inputs), None)
    return [*out.shape[2:], *state.shape[1:]], out.dtype, state.dtype


def linear_attention(rule: _Rule, step: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Linear attention over tokens, whose backward processes `step` tokens at a time.

    Args:
        rule: Stock's code; two equal rules are one. It gets some tokens of the inputs and the state before them, and
            returns their output and the state after them. All tokens at once and one segment after the other must give
            the same results.
        step: Tokens of a segment.
        inputs: ``[B, T, ...]``: queries, keys, values, decays and other tensors with one entry per token.

    Returns:
        The output ``[B, T, ...]``, and the last state.

    Saves:
        The inputs (stock: all intermediate tensors of the rule, for all tokens).

    Gradient:
        Exact, first order only: backward runs stock's own ops on the segments twice, for the states and for gradients.
    """
    key = _InSegments(rule, step, inputs[0].device.type, autocast_dtype(inputs[0]))
    if key not in _known:
        _known.append(key)
    out: tuple[Tensor, Tensor] = LinearAttentionFunction.apply(_known.index(key), *inputs)  # type: ignore[no-untyped-call]
    return out
