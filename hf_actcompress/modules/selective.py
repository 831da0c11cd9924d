"""Patched modules whose own code runs again in backward while their linear layers do not: see records/selective.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from ..ops.autocast import SameAutocast, autocast_dtype
from ..records import Forward, current, run_selectively
from .base import PatchedModule, has_hooks, recording
from .empty_cache import EmptyCache

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule

_DIFFERS = "a second run of its forward did not give what the first gave: it keeps what stock keeps"


def recalled(x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    """What a linear layer computes from x; inside of a module that runs again, what it returned the first time."""
    call = None if torch.compiler.is_compiling() else current.call
    return compute() if call is None else call.linear(x, compute)


class SelectiveMixin(_Module):
    """A module with code of its own between its linear layers: eager attention, a state-space scan."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is None or torch.compiler.is_compiling() or current.net is None:
            return super().forward(*args, **kwargs)
        x = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.is_floating_point()), None)
        again = _for_second_run(self, args, kwargs)
        if x is None or again is None or not recording(x) or any(map(has_hooks, self._modules.values())):
            return super().forward(*args, **kwargs)
        stock = self.stock_forward()
        proved: dict[Any, bool] = self.__dict__.setdefault("actcompress_proved", {})
        kind = (x.dtype, autocast_dtype(x), self.training, *_kinds(args), *kwargs, *_kinds(tuple(kwargs.values())))
        out = run_selectively(Forward(stock, SameAutocast(_Fresh(stock), x), again, proved, kind), args, kwargs)
        if not settings.note and not all(proved.values()):
            self.__dict__["actcompress"] = replace(settings, note=_DIFFERS)
        return out


def _kinds(values: tuple[Any, ...]) -> list[str]:
    return [type(value).__name__ for value in values]


class _Fresh:
    """A forward that gets a new cache in place of one that was empty."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{k: v.new() if isinstance(v, EmptyCache) else v for k, v in kwargs.items()})


def _for_second_run(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords that are others in a second run; None if there can be none."""
    if any(isinstance(value, Cache) for value in args):
        return None
    caches = {name: value for name, value in kwargs.items() if isinstance(value, Cache)}
    layer = module.__dict__.get("layer_idx")
    if caches and layer is None:
        return None
    empty = {name: EmptyCache.of(cache, layer) for name, cache in caches.items()}
    return None if None in empty.values() else empty
