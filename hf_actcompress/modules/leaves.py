"""Patched leaf modules: linear layers, norms, activations, dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import ops
from ..codecs import IDENTITY, Codec
from ..reference import draws_like_any
from .base import PatchedModule, is_sharded, keeps_for_backward, recording

if TYPE_CHECKING:
    # for the type checker the mixins are modules, which they are once combined with their stock class
    class _Module(PatchedModule, nn.Module):
        weight: Tensor
        bias: Tensor | None
else:
    _Module = PatchedModule


class LinearMixin(_Module):
    """nn.Linear (variant "") or transformers' Conv1D (variant "transposed")."""

    def forward(self, x: Tensor) -> Tensor:
        if not keeps_for_backward(x, self.weight, self.bias):
            return super().forward(x)  # type: ignore[no-any-return]
        settings = self.actcompress
        return ops.linear(
            x,
            self.weight,
            self.bias,
            transposed=settings.variant == "transposed",
            codec=settings.codec,
            derive=settings.keeps == "input",
        )


class Conv2dMixin(_Module):
    """nn.Conv2d; options: its stride, padding and dilation, in pixels, and groups."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or not x.numel() or not keeps_for_backward(x, self.weight, self.bias):
            return super().forward(x)  # type: ignore[no-any-return]
        settings = self.actcompress
        # an input without gradient are the pixels, which the batch holds as they are
        codec = settings.codec if x.requires_grad else IDENTITY
        derive = settings.keeps == "input"
        return ops.conv2d(x, self.weight, self.bias, settings.options, codec=codec, derive=derive)  # type: ignore[arg-type]


class LayerNormMixin(_Module):
    """nn.LayerNorm and subclasses that keep its forward."""

    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if not keeps_for_backward(x, self.weight, self.bias):
            return super().forward(x)  # type: ignore[no-any-return]
        if self.actcompress.keeps == "output":
            return ops.layer_norm_output(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return ops.layer_norm(
            x,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            codec=self.actcompress.codec,
            copy_affine=is_sharded(self),
        )


class RMSNormMixin(_Module):
    """Any RMSNorm whose forward was shown to be one of the variants; options: the name of its eps attribute."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters.get("weight")
        if not keeps_for_backward(x, weight):
            return super().forward(x)  # type: ignore[no-any-return]
        settings = self.actcompress
        eps = getattr(self, settings.options[0])
        if settings.keeps == "output":
            return ops.rms_norm_output(x, weight, eps, settings.variant)
        return ops.rms_norm(x, weight, eps, settings.variant, codec=settings.codec, copy_affine=is_sharded(self))


_Stock = Callable[[Tensor], Tensor]
_Options = tuple[float, ...]


def _input(x: Tensor, stock: _Stock, kind: str, options: _Options, codec: Codec) -> Tensor:
    return ops.activation(x, stock, kind, options, codec=codec)


def _output(x: Tensor, stock: _Stock, kind: str, options: _Options, codec: Codec) -> Tensor:
    return ops.activation_output(x, stock, kind)


def _derivative(x: Tensor, stock: _Stock, kind: str, options: _Options, codec: Codec) -> Tensor:
    return ops.activation_derivative(x, stock, kind, options, codec=codec)


def _fewbit(method: str, bits: int) -> Callable[..., Tensor]:
    def keep(x: Tensor, stock: _Stock, kind: str, options: _Options, codec: Codec) -> Tensor:
        return ops.activation_fewbit(x, stock, kind, options, bits=bits, method=method)

    return keep


# by what a pointwise activation keeps
ACTIVATION_OPS: dict[str, Callable[..., Tensor]] = {
    "input": _input,
    "output": _output,
    "derivative": _derivative,
    **{f"steps{bits}": _fewbit("steps", bits) for bits in (1, 2, 3, 4)},
    **{f"values{bits}": _fewbit("values", bits) for bits in (2, 3, 4, 8)},
    "relus2": _fewbit("relus", 2),
}


class ActivationMixin(_Module):
    """A pointwise activation; variant: its row of `reference.ACTIVATIONS`, options: that row's constants."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or not keeps_for_backward(x):
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]
        settings = self.actcompress
        keep = ACTIVATION_OPS[settings.keeps]
        return keep(x, self.stock_forward(), settings.variant, settings.options, settings.codec)


class DropoutMixin(_Module):
    """nn.Dropout. The mask's replay needs eager mode and a contiguous, aligned input; elsewhere the stock op runs."""

    p: float

    def forward(self, x: Tensor) -> Tensor:
        eager = not torch.compiler.is_compiling() and x.is_contiguous() and x.numel() > 0
        # x need not require a gradient: an adapter on the output may be the first thing that does
        if not (self.training and self.p > 0 and eager and recording(x) and draws_like_any(x)):
            return super().forward(x)  # type: ignore[no-any-return]
        return ops.dropout(x, self.p, codec=self.actcompress.codec)
