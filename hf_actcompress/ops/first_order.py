"""Backward functions that can be differentiated once; asking for a second derivative raises an error."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..private_apis import delayed_error

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
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Tensor | None) -> Any:
        if not always and grads.count(None) == len(grads):
            return (None,) * len(ctx.needs_input_grad)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        results = results if isinstance(results, tuple) else (results,)
        return delayed_error(_MESSAGE, len(results))(*map(_requiring, results))

    return once


def _requiring(grad: Tensor | None) -> Tensor | None:
    """An alias that requires grad, so that autograd makes a node for it."""
    return grad.detach().requires_grad_() if grad is not None else None
