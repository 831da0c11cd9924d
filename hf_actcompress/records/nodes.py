"""Autograd nodes of torch that save everything that their output is computed from, and how to recompute it.

The node of a product `y = a * b` in stock code keeps a and b. An op that saves y later need not keep y, because that
node has both factors. Only pointwise functions are listed, because they are cheap, and computing them again gives the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..private_apis import unset_fake_temporarily


class Pointwise(NamedTuple):
    """How the output of one kind of node is recomputed.

    Args:
        compute: Takes the saved tensors in the order in which the node saves them, and the options by name.
        tensors: How many tensors it saves if all inputs need a gradient. If it saved fewer, its output cannot be
            computed.
        options: Names of the saved values that are no tensors.
    """

    compute: Callable[..., Tensor]
    tensors: int = 1
    options: tuple[str, ...] = ()


def _divided(divisor: Tensor, x: Tensor) -> Tensor:
    return x / divisor


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _glu(x: Tensor, dim: int) -> Tensor:
    # torch saves a negative dimension as an unsigned number
    return F.glu(x, dim - 2**64 if dim >= 2**63 else dim)


POINTWISE_NODES: dict[str, Pointwise] = {
    "DivBackward0": Pointwise(_divided, 2),
    "GeluBackward0": Pointwise(_gelu, options=("approximate",)),
    "GluBackward0": Pointwise(_glu, options=("dim",)),
    "HardswishBackward0": Pointwise(F.hardswish),
    "LeakyReluBackward0": Pointwise(F.leaky_relu, options=("negative_slope",)),
    "MishBackward0": Pointwise(F.mish),
    "MulBackward0": Pointwise(torch.mul, 2),
    "SiluBackward0": Pointwise(F.silu),
    "SoftplusBackward0": Pointwise(F.softplus, options=("beta", "threshold")),
}


def computation(node: Any, sources: int, dtype: torch.dtype, device: torch.device) -> Callable[..., Tensor] | None:
    """The function that makes a node's output from the tensors that it saves; None if there is none.

    Args:
        node: The node.
        sources: How many tensors it has saved.
        dtype: The dtype of its output.
        device: The device.
    """
    row = POINTWISE_NODES.get(type(node).__name__)
    if row is None or sources != row.tensors or not _is_proved(node, row, dtype, device):
        return None
    return partial(row.compute, **_options(row, node)) if row.options else row.compute


def _options(row: Pointwise, node: Any) -> dict[str, Any]:
    return {name: getattr(node, f"_saved_{name}") for name in row.options}


_proved: dict[tuple[Any, ...], bool] = {}


def _is_proved(node: Any, row: Pointwise, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the function gives a node's output bit by bit. It is tried once per kind of node, dtype and device.

    Another version of torch may save other tensors in a node, or save them in another order.
    """
    key = type(node), dtype, device.type
    if key not in _proved:
        with unset_fake_temporarily():
            _proved[key] = _is_recomputed(node, row, _numbers(device).to(dtype))
    return _proved[key]


def _numbers(device: torch.device) -> Tensor:
    """Numbers on that device with which to try a node; on the CPU if the machine does not have the estimated device."""
    try:
        return torch.linspace(0.1, 3, 64, device=device).view(4, 16)
    except (AssertionError, RuntimeError):
        return torch.linspace(0.1, 3, 64, device="cpu").view(4, 16)


def _is_recomputed(node: Any, row: Pointwise, numbers: Tensor) -> bool:
    """Make a node of that kind from these numbers, take what it saves, and compare its output recomputed."""
    options = _options(row, node)
    leaves = [numbers.clone().requires_grad_(), numbers.flip(0).contiguous().requires_grad_()][: row.tensors]
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return x.detach()

    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
            y = row.compute(*leaves, **options)
        with torch.no_grad():
            again = row.compute(*saved, **options)
    except (RuntimeError, TypeError, ValueError):
        return False
    same = type(y.grad_fn) is type(node) and len(saved) == row.tensors and again.dtype == y.dtype
    return same and torch.equal(again, y)
