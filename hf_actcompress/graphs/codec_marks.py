"""Codecs of a layer's modules in its graph: a mark names the module, and each layer has its own codec for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.fx import Node

from ..codecs import IDENTITY, Codec
from ..compilation.marks import MODULE, PART, keep
from ..compilation.policy import CODEC, hint, made_by
from ..modules.base import settings_of
from ..ops.snapshot import Snapshot
from ..roles import Role

# parts that are made of heads [B, H, T, D]; they are packed as [B, T, H, D]
_HEADS = frozenset({"q", "k", "v", "output"})
_TOKENS_FIRST = (0, 2, 1, 3)


class Mark(NamedTuple):
    """What a module has marked.

    Attributes:
        module: The module, by its name in the layer; empty for the layer itself.
        part: Which of several tensors of the module it is; empty for a module that keeps one.
    """

    module: str
    part: str

    def codec_in(self, layer: nn.Module) -> Codec:
        """The codec of one layer."""
        settings = settings_of(layer.get_submodule(self.module))
        if self == OTHER:
            return other_codec(layer)
        codec = IDENTITY if settings is None else settings.codec
        return codec.part(self.part, heads=self.part in _HEADS) if self.part else codec

    def order(self, x: Tensor) -> tuple[int, ...] | None:
        """The dimensions of x in the order in which it is packed; None: as they are."""
        if self.part in _HEADS and x.dim() == len(_TOKENS_FIRST):
            return _TOKENS_FIRST
        return None if x.is_contiguous() else order_in_memory(x)


# an activation that no module has marked and the layer's own code, or that of a module without a role, keeps
OTHER = Mark("", "other")


def other_codec(layer: nn.Module) -> Codec:
    """The codec of a layer for activations that no patched module keeps."""
    codec: Codec = getattr(settings_of(layer), "other", IDENTITY)
    return codec


def name_codecs(snapshot: Snapshot, layer: nn.Module) -> None:
    """Let the copies of a layer's modules mark what they keep by their own names."""
    for name, module in layer.named_modules():
        settings = settings_of(module)
        if module is not layer and settings is not None and settings.codec != IDENTITY:
            named = copy.copy(settings)
            object.__setattr__(named, "codec_name", MODULE + name)
            snapshot.replace(module, "actcompress", named)


def has_attention(layer: nn.Module) -> bool:
    """Whether there is a patched attention module in a layer."""
    return any(known.role == Role.ATTENTION for part in layer.modules() if (known := settings_of(part)) is not None)


def _marked_attention(output: bool, /, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    q, k, v = (keep(x, MODULE + PART + part) for x, part in zip((query, key, value), "qkv", strict=True))
    y = nn.functional.scaled_dot_product_attention(q, k, v, *args, **kwargs)
    return keep(y, MODULE + PART + "output") if output else y


def attention_marks(layer: nn.Module) -> dict[Callable[..., Any], Callable[..., Any]]:
    """Let calls of torch's attention mark what they read and return as the layer's own, if it has a codec.

    Patched attention modules mark this themselves.
    """
    codec = getattr(settings_of(layer), "codec", IDENTITY)
    if codec == other_codec(layer) == IDENTITY or has_attention(layer):
        return {}
    # without a codec for it, the output has that of the linear layer that reads it
    marked = partial(_marked_attention, codec != IDENTITY)
    return {nn.functional.scaled_dot_product_attention: marked}


def codec_mark(x: Node) -> Mark | None:
    """The mark of the module through whose codec a kept tensor goes; None if it is kept as it is."""
    value = x.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    name = x.meta.get(CODEC) or made_by(x).meta.get(CODEC) or ""
    if not name.startswith(MODULE):
        return None
    module, _, part = name[len(MODULE) :].partition(PART)
    return Mark(module, part)


def order_in_memory(x: Tensor) -> tuple[int, ...]:
    """The dimensions of x, the one with the largest stride first."""
    return tuple(sorted(range(x.dim()), key=lambda i: (-hint(x.stride(i)), i)))
