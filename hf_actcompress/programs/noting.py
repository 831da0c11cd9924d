"""Modules and rotary embeddings that are noted as a whole while a layer is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..modules.leaves import ActivationMixin, DropoutMixin, LayerNormMixin, LinearMixin, RMSNormMixin, as_it_is
from ..modules.recomputed import RecomputedMixin
from .broadcast import Shift
from .operations import LayerNorm, Linear, RMSNorm
from .own_code import OwnCode, Recomputed
from .pointwise import Activation, Dropout, Rope
from .recorder import Recorder
from .step import Operation


def operation_of(module: Any) -> Operation | None:
    settings = module.actcompress
    if isinstance(module, LinearMixin):
        return Linear(settings.kind == "transposed")
    if isinstance(module, RMSNormMixin):
        return RMSNorm(getattr(module, settings.eps_name), settings.kind) if settings.pairs is None else None
    if isinstance(module, LayerNormMixin):
        return LayerNorm(tuple(module.normalized_shape), module.eps)
    if isinstance(module, ActivationMixin):
        found = as_it_is(module) if settings.keeps == "input" else None
        # the module of the copy without data will do: an activation has no weights
        return Activation(module, settings.kind, found[1]) if found is not None else None
    if isinstance(module, RecomputedMixin):
        whole = not module._modules and not module._buffers
        return Recomputed(OwnCode(module)) if whole else None
    return Dropout(module.p) if isinstance(module, DropoutMixin) else None


def noted(recorder: Recorder, module: Any, operation: Operation, stock: Callable[..., Tensor], x: Tensor) -> Tensor:
    """The forward of a module that is noted as a whole."""
    if isinstance(operation, Dropout) and (operation.p == 0 or not module.training):
        return x
    with recorder.silently():
        # autocast would let a product take mixed dtypes, but it does not act on tensors without data
        weight = module._parameters.get("weight")
        y = stock(x.to(weight.dtype) if isinstance(operation, Linear) else x)
    if isinstance(operation, Linear) and recorder.autocast is not None:
        y = torch.empty(y.shape, dtype=recorder.autocast, device="meta")
    more = {RMSNorm: 1, LayerNorm: 2, Dropout: 1}.get(type(operation), 0)
    weights: tuple[Tensor | None, ...] = ()
    if isinstance(operation, (Linear, LayerNorm)):
        weights = module._parameters["weight"], module._parameters["bias"]
    elif isinstance(operation, RMSNorm):
        weights = (module._parameters.get("weight"),)
    elif isinstance(operation, Recomputed):
        weights = tuple(w for w in module._parameters.values() if w is not None)
    codec = module.actcompress.codec
    recorder.note(operation, (x, *weights), y, *(torch.empty(0, device="meta") for _ in range(more)), codec=codec)
    return y


def product(recorder: Recorder, module: Any, x: Tensor) -> Tensor:
    """The forward of a linear layer that adds its bias after the product, as an operation of its own."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    y = torch.empty(*x.shape[:-1], weight.size(0), dtype=recorder.autocast or weight.dtype, device="meta")
    recorder.note(Linear(False), (x, weight, None), y)
    if bias is None:
        return y
    shifted = torch.empty(y.shape, dtype=torch.promote_types(y.dtype, bias.dtype), device="meta")
    recorder.note(Shift(), (y, bias), shifted)
    return shifted


def rotated(
    recorder: Recorder, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    turned = []
    for x in (q, k):
        dtype = torch.promote_types(x.dtype, cos.dtype)
        with recorder.silently():
            y = torch.empty_like(x, dtype=dtype)
        recorder.note(Rope(unsqueeze_dim), (x, cos, sin), y)
        turned.append(y)
    return turned[0], turned[1]
