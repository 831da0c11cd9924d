"""Why a layer cannot run by plans at all, whatever it is called with."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import IDENTITY, Codec, packs_alike
from ..modules.base import Settings, is_sharded, settings_of
from ..private_apis import FakeTensor
from ..roles import Role

# fake tensors count as plain, or an estimate would take another path than the training
_WEIGHTS = frozenset({nn.Parameter, Tensor, nn.Buffer, FakeTensor})
_STRIDED, _layout = frozenset({torch.strided}), attrgetter("layout")
# the roles whose ops have variants with another backward than stock's
_VARIANTS = (Role.NORM, Role.ACTIVATION, Role.LINEAR, Role.CONV2D)
# rules of others, registered through `extension`, have ops of their own
_PACKAGE = __name__.partition(".")[0] + "."


def why_not(layer: nn.Module, other: Codec) -> str:
    """Why no plan can do what the config asks of the modules in a layer; empty if one can.

    `other` is the codec of what no patched module keeps.
    """
    if not packs_alike(other):
        return f"codec {other} is not for plans"
    if "forward" in vars(layer):
        return "its forward was replaced"
    opaque = set(opaque_in(layer))
    if not all(map(_is_plain, set(layer.modules()) - opaque)) or any(map(is_sharded, opaque)):
        return "a weight is no plain parameter"
    for name, module in layer.named_modules():
        settings = settings_of(module)
        if module is layer or settings is None:
            continue
        if not type(module).__mro__[1].__module__.startswith(_PACKAGE):
            return f"{name} has an op of its own"
        if settings.role == Role.BATCH_NORM and other != IDENTITY:
            return f"{name} has an input that goes through a codec of feature maps"
        unknown = settings.role in _VARIANTS and settings.keeps != "input"
        unknown = unknown or (settings.role == Role.ATTENTION and _is_for_modules(settings))
        if unknown or not packs_alike(settings.codec):
            return f"{name} keeps something in a way that plans do not know"
    return ""


def opaque_in(layer: nn.Module) -> list[nn.Module]:
    """The linear layers in a layer whose weights are quantised, and of which no tracer sees the inside: they have
    packed numbers or a class of tensors of their own, and no gradients."""
    return [module for module in layer.modules() if _is_opaque(module)]


def _is_opaque(module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or any(True for _ in module.children()) or _is_plain(module):
        return False
    return not any(p is not None and p.requires_grad for p in module._parameters.values())


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's own weights are plain numbers. In an estimate, quantised ones have no class of their own."""
    parameters = [p for p in module._parameters.values() if p is not None]
    plain = all(map(is_plain_weight, (*parameters, *module._buffers.values())))
    return plain and all(p.is_floating_point() for p in parameters)


def _is_for_modules(attention: Settings) -> bool:
    """Whether attention keeps its output beside rounded queries and keys, from which it runs again; or is eager."""
    return attention.kind == "eager" or (attention.keeps == "recomputed" and attention.codec != IDENTITY)


def is_plain_weight(x: Any) -> bool:
    """Whether a weight or a buffer is a plain tensor of numbers, none of a class of its own."""
    return x is None or are_plain_weights((x,))


def are_plain_weights(weights: Sequence[Any]) -> bool:
    """Whether all of these are such tensors. Every call of a layer asks."""
    return _WEIGHTS.issuperset(map(type, weights)) and _STRIDED.issuperset(map(_layout, weights))
