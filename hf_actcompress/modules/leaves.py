"""Patched leaf modules: linear layers, norms, activations, dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import compilation, ops
from ..codecs import IDENTITY, Codec
from ..records import current
from ..reference import draws_like_any, linear_fwd
from ..reference.device_rules import on_cpu
from .base import PatchedModule, is_sharded, keeps_for_backward, only_tensor, recording
from .selective import recalled

# bytes, of a CPU's generator
_STATE = 5056

if TYPE_CHECKING:
    # for the type checker the mixins are modules, which they are once combined with their stock class
    class _Module(PatchedModule, nn.Module):
        weight: Tensor
        bias: Tensor | None
else:
    _Module = PatchedModule


class LinearMixin(_Module):
    """nn.Linear (variant "") or transformers' Conv1D (variant "transposed")."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not recording(x):
            if current.unread is self and x is not None and settings is not None and torch.is_grad_enabled():
                transposed = settings.variant == "transposed"
                return ops.linear(x, self.weight, self.bias, transposed=transposed, unread=True)
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        # read once: a parametrisation computes the weight each time that it is read
        weight, bias = self.weight, self.bias
        transposed = settings.variant == "transposed"
        if not keeps_for_backward(x, weight, bias):
            return linear_fwd(x, weight, bias, transposed)
        derive = settings.keeps == "input"
        if torch.compiler.is_compiling() and derive:
            return linear_fwd(compilation.offer(x, settings.codec_name), weight, bias, transposed)
        compute = partial(ops.linear, x, weight, bias, transposed=transposed, codec=settings.codec, derive=derive)
        return recalled(x, compute)


class OwnLinearMixin(_Module):
    """A subclass of nn.Linear with a forward of its own, which runs once in a module that runs again."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = only_tensor(args, kwargs)
        if x is None or not keeps_for_backward(x, self.weight, self.bias):
            return super().forward(*args, **kwargs)
        return recalled(x, partial(super().forward, *args, **kwargs))


class Conv2dMixin(_Module):
    """nn.Conv2d; options: its stride, padding and dilation, in pixels, and groups."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or x.dim() != 4 or not x.numel() or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = self.weight, self.bias
        if not keeps_for_backward(x, weight, bias):
            return self._conv_forward(x, weight, bias)  # type: ignore[operator, no-any-return]
        # pixels need no gradient: the batch holds them anyway, so keeping them as they are costs nothing
        codec, name = (settings.codec, settings.codec_name) if x.requires_grad else (IDENTITY, compilation.PLAIN)
        derive = settings.keeps == "input" or codec == IDENTITY
        if torch.compiler.is_compiling() and derive:
            return self._conv_forward(compilation.offer(x, name), weight, bias)  # type: ignore[operator, no-any-return]
        return recalled(x, partial(ops.conv2d, x, weight, bias, settings.options, codec=codec, derive=derive))  # type: ignore[arg-type]


class LayerNormMixin(_Module):
    """nn.LayerNorm and subclasses that keep its forward."""

    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = self.weight, self.bias
        if not keeps_for_backward(x, weight, bias):
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        if settings.keeps == "output":
            return ops.layer_norm_output(x, self.normalized_shape, weight, bias, self.eps)
        if torch.compiler.is_compiling():
            x = compilation.keep(x, settings.codec_name)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        copy = is_sharded(self)
        return ops.layer_norm(x, self.normalized_shape, weight, bias, self.eps, codec=settings.codec, copy_affine=copy)


class RMSNormMixin(_Module):
    """Any RMSNorm whose forward was shown to be one of the variants.

    Options: the name of its eps attribute; whether it has a weight; the dtypes of input and weight for which the
    variant was shown to hold, None for all of them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        eps_name, has_weight, pairs = settings.options
        weight = self.weight if has_weight else None
        shown = pairs is None or (x.dtype, weight.dtype if weight is not None else None) in pairs
        if not shown or not keeps_for_backward(x, weight):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        eps = getattr(self, eps_name)
        if settings.keeps == "output":
            return ops.rms_norm_output(x, weight, eps, settings.variant)
        if torch.compiler.is_compiling():
            return super().forward(compilation.keep(x, settings.codec_name))  # type: ignore[no-any-return]
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


# variants of a pointwise activation, by the tensor that each keeps
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

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not keeps_for_backward(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        if torch.compiler.is_compiling() and settings.keeps == "input":
            return super().forward(compilation.keep(x, settings.codec_name))  # type: ignore[no-any-return]
        keep = ACTIVATION_OPS[settings.keeps]
        return keep(x, self.stock_forward(), settings.variant, settings.options, settings.codec)


class DropoutMixin(_Module):
    """nn.Dropout. The mask's replay needs eager mode and a contiguous, aligned input; elsewhere the stock op runs."""

    p: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not (self.training and self.p > 0 and self._replays(x)):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        return ops.dropout(x, self.p, codec=settings.codec)

    @staticmethod
    def _replays(x: Tensor) -> bool:
        eager = not torch.compiler.is_compiling() and x.is_contiguous() and x.numel() > 0
        # of a CPU, the generator's state is more than the mask and the output of a tiny dropout
        if on_cpu(x) and 2 * x.nbytes < _STATE:
            return False
        # x need not require a gradient: an adapter on the output may be the first thing that does
        return eager and recording(x) and draws_like_any(x)
