"""Why a layer cannot run by plans at all, whatever it is called with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import IDENTITY, Codec, packs_alike
from ..modules.base import Settings, settings_of
from ..private_apis import FakeTensor
from ..roles import Role

# fake tensors count as plain, or an estimate would take another path than the training
_WEIGHTS = frozenset({nn.Parameter, Tensor, nn.Buffer, FakeTensor})
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
    parameters = [x for part in layer.modules() for x in part._parameters.values() if x is not None]
    buffers = [x for part in layer.modules() for x in part._buffers.values() if x is not None]
    # quantised ones, also in an estimate, whose weights have no data and no class of their own
    packed = any(not x.is_floating_point() for x in parameters)
    if packed or not all(map(is_plain_weight, (*parameters, *buffers))):
        return "a weight is no plain parameter"
    for name, module in layer.named_modules():
        settings = settings_of(module)
        if module is layer or settings is None:
            continue
        if not type(module).__mro__[1].__module__.startswith(_PACKAGE):
            return f"{name} has an op of its own"
        unknown = settings.role in _VARIANTS and settings.keeps != "input"
        unknown = unknown or (settings.role == Role.ATTENTION and _is_for_modules(settings))
        if getattr(settings, "tile", 0):
            return f"{name} is computed in tiles"
        if settings.role == Role.BATCH_NORM:
            return f"{name} writes running statistics"
        if unknown or not packs_alike(settings.codec):
            return f"{name} keeps something in a way that plans do not know"
    return ""


def _is_for_modules(attention: Settings) -> bool:
    """Whether attention keeps its output beside rounded queries and keys, from which it runs again; or is eager."""
    return attention.kind == "eager" or (attention.keeps == "recomputed" and attention.codec != IDENTITY)


def is_plain_weight(x: Any) -> bool:
    """Whether a weight or a buffer is a plain tensor of numbers, none of a class of its own."""
    return x is None or (type(x) in _WEIGHTS and x.layout == torch.strided)
