"""What torch's own autograd nodes say about their output: what they save makes it again, and how.

A product `y = a * b` in stock code keeps a and b. Who saves y after that need not keep it: its node has all of it. Only
functions of single elements are listed. They are cheap, and computed again they have the same bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..private_apis import FakeTensor


@dataclass(frozen=True)
class Pointwise:
    """How the output of one kind of node is computed again.

    Args:
        compute: Takes the saved tensors in the order in which the node saves them, and then the options.
        tensors: How many it saves where all inputs need a gradient. Where it saved fewer, nothing can be computed.
        options: Names of the numbers and words that it saves.
    """

    compute: Callable[..., Tensor]
    tensors: int = 1
    options: tuple[str, ...] = ()


def _divided(divisor: Tensor, x: Tensor) -> Tensor:
    return x / divisor


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _glu(x: Tensor, dim: int) -> Tensor:
    # the node has it as a number without sign
    return F.glu(x, dim if dim < 2**63 else dim - 2**64)


def _dropped(mask: Tensor, x: Tensor, p: float) -> Tensor:
    return x * mask * (1 / (1 - p))


POINTWISE: dict[str, Pointwise] = {
    "AbsBackward0": Pointwise(torch.abs),
    "CosBackward0": Pointwise(torch.cos),
    "DivBackward0": Pointwise(_divided, 2),
    "GeluBackward0": Pointwise(_gelu, options=("approximate",)),
    "GluBackward0": Pointwise(_glu, options=("dim",)),
    "HardswishBackward0": Pointwise(F.hardswish),
    "LeakyReluBackward0": Pointwise(F.leaky_relu, options=("negative_slope",)),
    "LogBackward0": Pointwise(torch.log),
    "MishBackward0": Pointwise(F.mish),
    # of a product with a dropout's mask, the net adds what was multiplied
    "MulBackward0": Pointwise(torch.mul, 2),
    "NativeDropoutBackward0": Pointwise(_dropped, 2, ("p",)),
    "PowBackward0": Pointwise(torch.pow, options=("exponent",)),
    "SiluBackward0": Pointwise(F.silu),
    "SinBackward0": Pointwise(torch.sin),
    "SoftplusBackward0": Pointwise(F.softplus, options=("beta", "threshold")),
}


def pointwise(node: object) -> Pointwise | None:
    """The row of a node; None if there is none, or no node."""
    return POINTWISE.get(type(node).__name__)


def computation(row: Pointwise, node: Any) -> Callable[..., Tensor]:
    """What makes the output of a node out of the tensors that it saves."""
    options = {name: getattr(node, f"_saved_{name}") for name in row.options}
    return partial(_positional, row.compute, tuple(options.values())) if options else row.compute


def _positional(compute: Callable[..., Tensor], options: tuple[Any, ...], *tensors: Tensor) -> Tensor:
    return compute(*tensors, *options)


_proved: dict[tuple[Any, ...], bool] = {}
_lock = threading.Lock()


def proved(y: Tensor, kind: type, compute: Callable[..., Tensor], sources: Callable[[], list[Tensor]]) -> bool:
    """Whether `compute(*sources())` is y, bit by bit: tried once per kind of node, dtype and device.

    What a node saves, and in which order, is torch's own affair and may be otherwise in its next version.
    """
    if isinstance(y, FakeTensor):
        return True
    key = kind, y.dtype, y.device.type
    if key not in _proved:
        same = _is_made_again(y, compute, sources)
        with _lock:
            _proved[key] = same
    return _proved[key]


def _is_made_again(y: Tensor, compute: Callable[..., Tensor], sources: Callable[[], list[Tensor]]) -> bool:
    try:
        with torch.no_grad():
            again = compute(*sources())
    except (RuntimeError, TypeError, ValueError):
        return False
    same = again.dtype == y.dtype and again.shape == y.shape
    return same and bool(((again == y) | (again.isnan() & y.isnan())).all())
