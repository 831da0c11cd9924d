"""Rules for leaf types. They match exact types, because a subclass may compute something else with the same weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import activations as hf
from transformers.pytorch_utils import Conv1D

from ..codecs import IDENTITY
from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..methods.fewbit.reference import TABLE_OPTIONS, TWO_VALUED
from ..methods.inverted.reference import INVERTED
from ..methods.norm_output.reference import layer_norm_output_reasons
from ..methods.row_sample.codec import RowSample
from ..methods.row_sample.codec_gradient_norms import RememberedNorms
from ..modules.base import FoundWith, Settings
from ..modules.batch_norm import BatchNormMixin
from ..modules.leaves import (
    ActivationMixin,
    ActivationSettings,
    Conv2dMixin,
    ConvSettings,
    DropoutMixin,
    LayerNormMixin,
    LinearMixin,
    lacks_table,
)
from ..reference import activation_bwd
from ..roles import Role
from .sites import Declined, Site, norm_keeps


@dataclass(frozen=True)
class ActivationRow:
    """A row: the derivative (of `reference.ACTIVATIONS`) and the attributes that hold its constants."""

    kind: str
    attributes: tuple[str, ...] = ()


ACTIVATION_TYPES: dict[type, ActivationRow] = {
    nn.SiLU: ActivationRow("silu"),
    nn.Mish: ActivationRow("mish"),
    nn.ReLU: ActivationRow("relu"),
    nn.ReLU6: ActivationRow("relu6"),
    nn.LeakyReLU: ActivationRow("leaky_relu", ("negative_slope",)),
    nn.Hardswish: ActivationRow("hardswish"),
    nn.Hardsigmoid: ActivationRow("hardsigmoid"),
    nn.ELU: ActivationRow("elu", ("alpha",)),
    nn.SELU: ActivationRow("selu"),
    nn.Softplus: ActivationRow("softplus", ("beta", "threshold")),
    nn.Softsign: ActivationRow("softsign"),
    nn.Sigmoid: ActivationRow("sigmoid"),
    nn.Tanh: ActivationRow("tanh"),
    hf.GELUActivation: ActivationRow("gelu"),
    hf.GELUTanh: ActivationRow("gelu_tanh"),
    hf.NewGELUActivation: ActivationRow("gelu_new"),
    hf.FastGELUActivation: ActivationRow("gelu_new"),
    hf.AccurateGELUActivation: ActivationRow("gelu_new"),
    hf.QuickGELUActivation: ActivationRow("quick_gelu"),
    hf.ClippedGELUActivation: ActivationRow("gelu_clipped", ("min", "max")),
    hf.SiLUActivation: ActivationRow("silu"),
    hf.MishActivation: ActivationRow("mish"),
    hf.LaplaceActivation: ActivationRow("laplace"),
    hf.ReLUSquaredActivation: ActivationRow("relu_squared"),
}
if hasattr(hf, "SqrtSoftplusActivation"):  # newer than transformers 5.17
    ACTIVATION_TYPES[hf.SqrtSoftplusActivation] = ActivationRow("sqrt_softplus")

# the same types if they compose the function in Python, which in fp32 is more accurate than the kernel
_COMPOSED = {hf.GELUActivation: ActivationRow("gelu_erf"), hf.GELUTanh: ActivationRow("gelu_new")}

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
WITH_PARAMETERS = (nn.PReLU, hf.XIELUActivation)


def find_leaf(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a leaf type of the tables."""
    kind = type(module)
    if kind in _RULES:
        return _RULES[kind](module, config)
    if isinstance(module, nn.Conv2d):
        return _conv2d(module, config)
    if kind is nn.GELU:
        row = ActivationRow("gelu_tanh" if module.approximate == "tanh" else "gelu")
        return _activation(module, config, row)
    if kind in _COMPOSED and inspect.ismethod(module.act):
        return _activation(module, config, _COMPOSED[kind])
    if kind in ACTIVATION_TYPES:
        return _activation(module, config, ACTIVATION_TYPES[kind])
    if kind in _BATCH_NORMS:
        # torch's own node keeps the input, so a codec has no effect
        return Site(BatchNormMixin, Settings(Role.BATCH_NORM, "input")) if config.derive_linear else None
    if kind in WITH_PARAMETERS:
        return Declined(Role.ACTIVATION, "has parameters of its own; not pointwise in its input alone")
    if isinstance(module, nn.Embedding):
        return Declined(Role.EMBEDDING, "keeps only its indices")
    if isinstance(module, nn.Linear) and kind.forward is not nn.Linear.forward:
        return Declined(Role.LINEAR, f"{kind.__name__} is a subclass of nn.Linear with a forward of its own")
    return None


def _linear(module: nn.Module, config: CompressionConfig, kind: str) -> Site:
    codec = CODECS[config.linear]
    if codec.for_images:
        note = f"keeps its input: {config.linear} is for feature maps"
        return Site(LinearMixin, Settings(Role.LINEAR, kind, note=note))
    if config.gradient_norms and isinstance(codec, RowSample):
        codec = replace(codec, norms=RememberedNorms(config.gradient_norms))
    keeps = "input" if config.derive_linear else "encoded"
    return Site(LinearMixin, Settings(Role.LINEAR, kind, codec, keeps))


def _conv2d(module: nn.Conv2d, config: CompressionConfig) -> Site | Declined:
    stock = nn.Conv2d
    if type(module).forward is not stock.forward or type(module)._conv_forward is not stock._conv_forward:
        return Declined(Role.CONV2D, f"{type(module).__name__} is a subclass of nn.Conv2d with a forward of its own")
    # left, right, top, bottom, in pixels, also of padding="same"
    left, right, top, bottom = module._reversed_padding_repeated_twice
    if module.padding_mode != "zeros" or left != right or top != bottom:
        return Declined(Role.CONV2D, "pads with something else than zeros, or unevenly")
    geometry: Any = (module.stride, (top, left), module.dilation, module.groups)
    keeps = "input" if config.derive_linear else "encoded"
    found_with = FoundWith.of(module, ("in_channels", "out_channels", "kernel_size"))
    settings = ConvSettings(
        Role.CONV2D, codec=CODECS[config.linear], keeps=keeps, geometry=geometry, found_with=found_with
    )
    return Site(Conv2dMixin, settings)


def _layer_norm(module: nn.Module, config: CompressionConfig) -> Site:
    settings = Settings(Role.NORM, "layer_norm", codec=CODECS[config.norm])
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    return Site(LayerNormMixin, norm_keeps(settings, config, layer_norm_output_reasons(weight, bias)))


def _dropout(module: nn.Module, config: CompressionConfig) -> Site | Declined:
    if module.inplace:
        return Declined(Role.DROPOUT, "works in place")
    codec = CODECS[config.linear]
    return Site(DropoutMixin, Settings(Role.DROPOUT, codec=IDENTITY if codec.for_images else codec))


def _activation(module: nn.Module, config: CompressionConfig, row: ActivationRow) -> Site | Declined:
    if getattr(module, "inplace", False):
        return Declined(Role.ACTIVATION, "works in place")
    options = tuple(float(getattr(module, name)) for name in row.attributes)
    if not _derivative_holds(module, row.kind, options):
        return Declined(Role.ACTIVATION, f"its derivative is not that of {row.kind!r} (found by a numeric probe)")
    variant = config.activation_variant
    if row.kind in TWO_VALUED and variant == "input" and not config.derive_linear:
        # the output is not rebuilt, so one bit is enough for the exact gradient
        variant = "steps1"
    keeps, note = _activation_keeps(row.kind, options, variant)
    codec = CODECS[config.mlp]
    found_with = FoundWith.of(module, row.attributes)
    settings = ActivationSettings(
        Role.ACTIVATION, row.kind, codec, keeps, note, attributes=row.attributes, found_with=found_with
    )
    return Site(ActivationMixin, settings)


def _activation_keeps(kind: str, options: tuple[float, ...], variant: str) -> tuple[str, str]:
    """What an activation of that kind keeps under a variant; if it keeps the input instead, also why."""
    if variant == "output" and kind not in INVERTED:
        return "input", f"keeps its input: {kind} has no inverse of two branches"
    if variant == "relus2" and kind not in ("gelu", "silu"):
        return "input", f"keeps its input: there is no ReLU combination for {kind}"
    if lacks_table(variant, kind, options):
        return "input", f"keeps its input: few bits have a table of {kind} with {TABLE_OPTIONS[kind]}, not {options}"
    return variant, ""


def _derivative_holds(module: nn.Module, kind: str, options: tuple[float, ...]) -> bool:
    """Probe f' against autograd in fp64, off the kinks."""
    with torch.enable_grad():
        x = torch.linspace(-7.03, 7.01, 61, dtype=torch.float64, device="cpu", requires_grad=True)
        try:
            # the module is not called, because the user's hooks must not see our probe
            y = type(module).forward(module, x)
            (expected,) = torch.autograd.grad(y.sum(), x)
        except Exception:
            return False
    return torch.allclose(activation_bwd(torch.ones_like(y), x.detach(), kind, options), expected, atol=1e-6)


_RULES: dict[type, Callable[[Any, CompressionConfig], Site | Declined]] = {
    nn.Linear: partial(_linear, kind=""),
    Conv1D: partial(_linear, kind="transposed"),
    nn.LayerNorm: _layer_norm,
    nn.Dropout: _dropout,
}
