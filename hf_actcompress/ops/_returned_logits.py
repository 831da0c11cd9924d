"""Logits that leave the forward of a model, for losses that are computed outside of it.

They behave like any tensor. Slices and scales of them stay deferred, and the functions of `row_functions` (log-softmax,
gather, logsumexp, entropy, cross entropy, ...) keep nothing of vocabulary size for backward: their gradient arrives at
the head as a `LogitsGradient`, for which the logits are recomputed, a few rows at a time. If the logits fit the head's
budget, the first of these functions keeps them for the others and for the head's backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..private_apis import without_torch_function
from ..records import applied, hooks_outside, is_dropped, load, parameter, save, stored_exact
from ..reference.linear_rows import linear_rows_bwd
from ..reference.logits_chunks import are_kept
from ._deferred_linear import LinearSource
from ._linear_cross_entropy import exact_record
from .deferred_logits import DeferredLogits, empty_like
from .deferred_values import Values
from .first_order import once_differentiable
from .gradient_parts import Chunk
from .logits_gradient import LogitsGradient
from .logits_origin import HeadOrigin, HeldHead, ReturnedSource, operands
from .row_set import rows_at, shifted
from .torch_functions import held_row_function, row_function

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None, None]


class ReturnedLogitsFunction(torch.autograd.Function):
    """Keeps the head's input by its record, the weight by reference, and logits that fit the head's budget."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor | None, source: ReturnedSource) -> Tensor:
        origin = source.origin
        assert origin is not None
        record = exact_record(h, origin.dtype)
        if is_dropped(record):
            # the logits of padding rows may be asked for
            record = stored_exact(h.detach().to(origin.dtype))
        save(ctx, record, parameter(weight), parameter(bias) if bias is not None else None)
        ctx.dtype, ctx.pointwise, ctx.kept = origin.dtype, origin.pointwise, source.kept
        ctx.inputs = (h.shape, h.dtype, weight.dtype, bias.dtype if bias is not None else None)
        return DeferredLogits(Values(source), source.like)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> _Grads:
        h, weight, bias = operands(load(ctx), ctx.dtype)
        kept = ctx.kept.take()

        def gradient(part: slice, logits: Callable[[], Tensor]) -> Tensor | None:
            if not isinstance(dy, LogitsGradient):
                return dy.reshape(-1, dy.size(-1))[part]
            out = torch.zeros((part.stop - part.start, dy.size(-1)), dtype=dy.dtype, device=dy.device)
            # the chunk's logits are computed on the first call
            chunk_logits = cache(logits) if kept is None else lambda: kept[part]
            chunk = Chunk(lambda rows: rows_at(chunk_logits(), shifted(rows, part.start)))
            return out if dy.part.add_to(out, part.start, chunk) else None

        whole = not isinstance(dy, LogitsGradient)
        grads = linear_rows_bwd(gradient, h, weight, bias, ctx.pointwise, ctx.needs_input_grad[:3], whole)
        shape, *dtypes = ctx.inputs
        dh, dweight, dbias = (g.to(dtype) if g is not None else None for g, dtype in zip(grads, dtypes, strict=True))
        return dh.view(shape) if dh is not None else None, dweight, dbias, None


def returned_logits(x: Tensor) -> Tensor | None:
    """Deferred logits in a form that may leave the forward in which their head ran; any other tensor unchanged.

    Args:
        x: What `deferred_linear` returned, ``[..., V]``, or a function of each element of it.

    Returns:
        DeferredLogits ``[..., V]``, or None for a selection of rows. They hold the head's input, and compute their
        values when something reads them: before or after backward, until the head's input or weight is modified, in
        place or through `.data`. With `keep_logits` and gradients they hold the values of this forward, computed now,
        so later changes of the model's weights do not matter.

    Saves:
        The head's input by its record, the weight by reference. If the logits fit the head's budget, also the logits,
        from the first function of them to backward, unless hooks of others get what is saved. Nothing else of
        vocabulary size. While the result is alive, it holds the head's input itself.

    Gradient:
        Exact.

    Raises:
        RuntimeError: Values are asked for after the head's input or weight has changed.
    """
    if not isinstance(x, DeferredLogits):
        return x
    head = x.chain.source
    if not isinstance(head, LinearSource) or x.rows is not None or x.chain.written():
        return None
    like = empty_like(x)
    held: HeldHead | Tensor
    if head.keep_logits and torch.is_grad_enabled():
        held = x.chain.get()
    else:
        held = HeldHead(head.dtype, x.pointwise, head.hidden, head.weight, head.bias)
    if not torch.is_grad_enabled():
        return DeferredLogits(Values(ReturnedSource(held, head.device, like, held_row_function)), like)
    origin = HeadOrigin(head.device, head.dtype, x.pointwise)
    rows, (vocabulary, hidden) = like.shape[:-1].numel(), head.weight.shape
    # not for the derivative of a function of each logit, for which the product runs again, and not past hooks of
    # others, such as `save_on_cpu`, which would not see them
    alone = not x.pointwise and hooks_outside() is None
    fits = alone and are_kept(rows, hidden, vocabulary, head.dtype.itemsize, head.budget)
    source = ReturnedSource(held, head.device, like, row_function, origin, fits)
    y = applied(ReturnedLogitsFunction, head.hidden, head.weight, head.bias, source)
    with without_torch_function():
        origin.edge = GradientEdge(y.grad_fn, y.output_nr)  # type: ignore[arg-type]
    return y
