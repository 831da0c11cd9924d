"""A linear layer with quantised weights, as one node of a layer's graph: the library's own code runs in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..modules.base import stock_type
from ..ops import opaque
from ..private_apis import FakeTensor, without_dispatch_modes


def node_of(module: nn.Module, path: str) -> Callable[[Tensor], Tensor]:
    """What the copy of a module runs while the layer around it is traced; `path` is the module's name in the layer."""
    return partial(opaque.linear, _forward, path, partial(_features, module))


def _forward(module: Any, x: Tensor) -> tuple[Tensor]:
    return (stock_type(module).forward(module, x),)


def _features(module: nn.Module, x: Tensor, autocast: torch.dtype | None) -> tuple[int, torch.dtype]:
    """How many features and which dtype the output has. The layer says it: it runs on one row of zeros."""
    own = [*module._parameters.values(), *module._buffers.values()]
    without_data = next((p for p in own if isinstance(p, FakeTensor)), None)
    mode: Any = nullcontext() if without_data is None else without_data.fake_mode
    with without_dispatch_modes(), torch.no_grad(), mode:
        row = torch.zeros(1, int(x.size(-1)), dtype=x.dtype, device=x.device)
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None, cache_enabled=False):
            y = _forward(module, row)[0]
    return y.size(-1), y.dtype
