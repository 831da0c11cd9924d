"""Backward functions that can be differentiated once; asking for a second derivative raises an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ..compiling import is_compiling
from ..private_apis import delayed_error
from ..private_apis.batching import as_batch, is_batched, outside_of_batch, samples_in
from .autocast import autocast_off, device_under_autocast

_MESSAGE = (
    "hf_actcompress has no second derivatives: an op of a patched model was differentiated twice (create_graph=True, a "
    "gradient penalty, a Hessian product). Restore the stock model first: unpatch_model(model)"
)


def once_differentiable(backward: Callable[..., Any], always: bool = False) -> Callable[..., Any]:
    """A backward that runs without autograd, and whose gradients raise when they are differentiated again.

    torch's decorator of that name does so only if an incoming gradient requires grad. The gradient of the loss does
    not, and then ``create_graph=True`` silently gives second derivatives without the terms of this op.

    Where no output has a gradient, no input gets one: autograd runs the nodes below a tensor that has none, too, and
    stock's nodes pass None on. The backward is called then only if it asks for that with `always`.

    It runs without autocast, also where the user's code calls it under one: it makes its forward's casts itself, and
    what it computes again has to be what the forward has computed.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        if not always and all([dy is None for dy in grads]):
            return (None,) * len(ctx.needs_input_grad)
        if is_compiling():
            return backward(ctx, *grads)
        device = device_under_autocast(grads)
        if device is not None:
            with autocast_off(device):
                return once(ctx, *grads)
        if any(map(is_batched, grads)):
            return _for_each_sample(partial(once, _Again(ctx)), grads)
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        results = results if isinstance(results, tuple) else (results,)
        return delayed_error(_MESSAGE, len(results))(*map(_requiring, results))

    return once


class _Again:
    """A ctx for a backward that runs several times."""

    runs_again = True

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def maybe_clear_saved_tensors(self) -> None:
        """Do nothing: the next run reads them, too."""


def _for_each_sample(backward: Callable[..., Any], grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of a batch of samples, for which a transform runs one backward. Our code takes no such tensors."""
    like = next(g for g in grads if is_batched(g))
    assert like is not None
    parts = [samples_in(g) if g is not None and is_batched(g) else None for g in grads]
    count = next(part.size(0) for part in parts if part is not None)
    with outside_of_batch(like):
        found = [
            backward(*(g if part is None else part[i] for g, part in zip(grads, parts, strict=True)))
            for i in range(count)
        ]
    found = [results if isinstance(results, tuple) else (results,) for results in found]
    return tuple(None if x[0] is None else as_batch(torch.stack(x), like) for x in zip(*found, strict=True))


def _requiring(grad: Tensor | None) -> Tensor | None:
    """An alias that requires grad, so that autograd makes a node for it."""
    return grad.detach().requires_grad_() if grad is not None else None
