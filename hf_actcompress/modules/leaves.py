"""Patched leaf modules: linear layers, norms, activations, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import compilation, ops
from ..codecs import IDENTITY
from ..compiling import is_compiling
from ..methods.derivative.op import activation_derivative
from ..methods.fewbit.op import activation_fewbit
from ..methods.fewbit.reference import TABLE_OPTIONS
from ..methods.inverted.op import activation_output
from ..methods.norm_output.op import layer_norm_output, rms_norm_output
from ..ops import traced_kernels
from ..records import current
from ..reference import ConvGeometry, draws_like_any, linear_fwd
from .base import (
    FoundWith,
    ModuleMixin,
    Settings,
    is_sharded,
    keeps_for_backward,
    keeps_output,
    only_tensor,
    recording,
    takes_gradient,
)


class _Module(ModuleMixin):
    weight: Tensor
    bias: Tensor | None


class LinearMixin(_Module):
    """nn.Linear (kind "") or transformers' Conv1D (kind "transposed")."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        settings = self.actcompress
        if compilation.is_traced() and settings is not None and settings.keeps == "input":
            return self._traced(args, kwargs)
        x = only_tensor(args, kwargs)
        if x is None or settings is None or not recording(x):
            if current.unread is self and x is not None and settings is not None and torch.is_grad_enabled():
                transposed = settings.kind == "transposed"
                return ops.linear(x, self.weight, self.bias, transposed=transposed, unread=True)
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        # read once: a parametrisation computes the weight each time that it is read
        weight, bias = self.weight, self.bias
        transposed = settings.kind == "transposed"
        if not takes_gradient(x, weight, bias):
            return linear_fwd(x, weight, bias, transposed)
        if is_compiling() and compilation.any_length():
            return self._untraced(x)  # type: ignore[no-any-return]
        derive = settings.keeps == "input"
        return ops.linear(x, weight, bias, transposed=transposed, codec=settings.codec, derive=derive)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The stock forward in a graph; its input is marked if it has a codec. Compiling time grows with each line."""
        assert self.actcompress is not None
        codec = self.actcompress.codec_name
        x = None if codec == compilation.PLAIN else only_tensor(args, kwargs)
        if x is None or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight = self.weight
        if x.requires_grad or weight.requires_grad:
            x = compilation.offer(x, codec)
        return linear_fwd(x, weight, self.bias, self.actcompress.kind == "transposed")


@dataclass(frozen=True, kw_only=True)
class ConvSettings(Settings):
    """A convolution's settings: stride, padding, dilation (in pixels) and groups, and the attributes that say so."""

    geometry: ConvGeometry
    found_with: FoundWith


class Conv2dMixin(_Module):
    """nn.Conv2d."""

    actcompress: ConvSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or x.dim() != 4 or not x.numel() or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = self.weight, self.bias
        if not takes_gradient(x, weight, bias):
            return self._conv_forward(x, weight, bias)  # type: ignore[operator, no-any-return]
        # an input without gradient is pixels: the batch holds them anyway, so keeping them as they are costs nothing
        codec, name = (settings.codec, settings.codec_name) if x.requires_grad else (IDENTITY, compilation.PLAIN)
        derive = settings.keeps == "input" or codec == IDENTITY
        if not settings.found_with.holds(self):
            return self._conv_forward(x, weight, bias)  # type: ignore[operator, no-any-return]
        if compilation.is_traced() and derive:
            return self._conv_forward(compilation.offer(x, name), weight, bias)  # type: ignore[operator, no-any-return]
        if is_compiling() and compilation.any_length():
            return self._untraced(x)  # type: ignore[no-any-return]
        return ops.conv2d(x, weight, bias, settings.geometry, codec=codec, derive=derive)


class LayerNormMixin(_Module):
    """nn.LayerNorm and subclasses that keep its forward."""

    normalized_shape: tuple[int, ...]
    eps: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight, bias = self.weight, self.bias
        if not takes_gradient(x, weight, bias):
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        if keeps_output(settings):
            return layer_norm_output(x, self.normalized_shape, weight, bias, self.eps)
        if compilation.is_traced():
            x = compilation.keep(x, settings.codec_name)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        copy = is_sharded(self)
        return ops.layer_norm(x, self.normalized_shape, weight, bias, self.eps, codec=settings.codec, copy_affine=copy)


@dataclass(frozen=True, kw_only=True)
class RMSNormSettings(Settings):
    """An RMSNorm's settings: the name of its eps attribute, and whether it has a weight.

    `pairs` are the dtypes of input and weight for which the formula was shown to hold; None stands for all of them.
    """

    eps_name: str
    has_weight: bool
    pairs: frozenset[tuple[torch.dtype, torch.dtype | None]] | None


class RMSNormMixin(_Module):
    """Any RMSNorm whose forward was shown to be one of the known formulas; kind: its row of `RMS_NORM_FORMULAS`."""

    actcompress: RMSNormSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not recording(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        weight, pairs = self.weight if settings.has_weight else None, settings.pairs
        shown = pairs is None or (x.dtype, weight.dtype if weight is not None else None) in pairs
        if not shown or not takes_gradient(x, weight):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        eps = getattr(self, settings.eps_name)
        if keeps_output(settings):
            return rms_norm_output(x, weight, eps, settings.kind)
        if compilation.is_traced():
            x = compilation.keep(x, settings.codec_name)
            y = traced_kernels.rms_norm(x, weight, eps, settings.kind) if compilation.is_traced_plan() else None
            return super().forward(x) if y is None else y  # type: ignore[no-any-return]
        return ops.rms_norm(x, weight, eps, settings.kind, codec=settings.codec, copy_affine=is_sharded(self))


@dataclass(frozen=True, kw_only=True)
class ActivationSettings(Settings):
    """An activation's settings: the attributes that hold the constants of its row, such as a slope or bounds.

    Each forward reads the constants. With others of the other attributes the module computes another function.
    """

    attributes: tuple[str, ...]
    found_with: FoundWith


_Stock = Callable[[Tensor], Tensor]
Constants = tuple[float, ...]


def as_it_is(act: Any) -> tuple[_Stock, Constants] | None:
    """The stock forward of a patched activation and the constants of its row now; None if it is another function now.

    The forward is that of a copy of the module: backward makes the output again as it was, whatever happens to the
    module in between.
    """
    settings: ActivationSettings = act.actcompress
    if not settings.found_with.holds(act):
        return None
    constants = tuple([float(getattr(act, name)) for name in settings.attributes])
    if compilation.is_traced():
        return act.stock_forward(), constants
    copy = act.stock_class.__new__(act.stock_class)
    copy.__dict__.update(act.__dict__)
    return partial(act.stock_class.forward, copy), constants


def lacks_table(keeps: str, kind: str, constants: Constants) -> bool:
    """Whether a variant of few bits has no table of the derivative with these constants."""
    return keeps not in ("input", "output", "derivative") and TABLE_OPTIONS.get(kind, constants) != constants


def _fewbit(method: str, bits: int) -> _ActivationOp:
    return lambda x, stock, c, s: activation_fewbit(x, stock, s.kind, c, bits=bits, method=method)


# the ops of a pointwise activation, by the tensor that each variant keeps
_ActivationOp = Callable[[Tensor, _Stock, Constants, ActivationSettings], Tensor]
ACTIVATION_OPS: dict[str, _ActivationOp] = {
    "input": lambda x, stock, c, s: ops.activation(x, stock, s.kind, c, codec=s.codec),
    "output": lambda x, stock, c, s: activation_output(x, stock, s.kind),
    "derivative": lambda x, stock, c, s: activation_derivative(x, stock, s.kind, c, codec=s.codec),
    **{f"steps{bits}": _fewbit("steps", bits) for bits in (1, 2, 3, 4)},
    **{f"values{bits}": _fewbit("values", bits) for bits in (2, 3, 4, 8)},
    "relus2": _fewbit("relus", 2),
}


class ActivationMixin(_Module):
    """A pointwise activation; kind: its row of `reference.ACTIVATIONS`."""

    actcompress: ActivationSettings | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not keeps_for_backward(x):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        if compilation.is_traced() and settings.keeps == "input":
            return self._traced(x, settings)
        if is_compiling() and compilation.any_length():
            return self._untraced(x)  # type: ignore[no-any-return]
        found = as_it_is(self)
        if found is None:
            return super().forward(x)  # type: ignore[no-any-return]
        plain = settings.keeps == "output" and not keeps_output(settings)
        keeps = "input" if plain or lacks_table(settings.keeps, settings.kind, found[1]) else settings.keeps
        if compilation.is_traced() and keeps == "input":
            return super().forward(compilation.keep(x, settings.codec_name))  # type: ignore[no-any-return]
        return ACTIVATION_OPS[keeps](x, *found, settings)

    def _traced(self, x: Tensor, settings: ActivationSettings) -> Tensor:
        x = compilation.keep(x, settings.codec_name)
        found = as_it_is(self) if compilation.is_traced_plan() else None
        y = None if found is None else traced_kernels.activation(x, found[0], settings.kind, found[1])
        return super().forward(x) if y is None else y  # type: ignore[no-any-return]


class DropoutMixin(_Module):
    """nn.Dropout. Drawing its mask again needs eager mode and a contiguous, aligned input; else the stock op runs."""

    p: float

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x, settings = only_tensor(args, kwargs), self.actcompress
        if x is None or settings is None or not (self.training and self.p > 0 and self._replays(x)):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        return ops.dropout(x, self.p, codec=settings.codec)

    @staticmethod
    def _replays(x: Tensor) -> bool:
        eager = not compilation.is_traced() and x.is_contiguous() and x.numel() > 0
        # x need not require a gradient: an adapter on the output may be the first thing that does
        return eager and recording(x) and draws_like_any(x)
