"""Autograd nodes of torch that save everything that their output is computed from, and how to recompute it.

The node of a product `y = a * b` in stock code keeps a and b. An op that saves y later need not keep y, because that
node has both factors. Only pointwise functions and pooling are listed, because they are cheap, and computing them
again gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from ..private_apis import unset_fake_temporarily
from .joining import signed


@dataclass(frozen=True)
class Pointwise:
    """How the output of one kind of node is recomputed.

    Args:
        compute: Takes the saved tensors in the order in which the node saves them, and the options by name.
        tensors: How many tensors it saves if all inputs need a gradient. If it saved fewer, its output cannot be
            computed.
        options: Names of the saved values that are no tensors.
        make: The function that makes such a node; by default `compute`.
        draws: Whether it draws random numbers and saves nothing else; its input is then added as the last source.
        pools: Whether it pools pixels. With a stride its output is kept: it is smaller than its input, which backward
            would have to make first, and the peak would rise by more than what is saved.
    """

    compute: Callable[..., Tensor]
    tensors: int = 1
    options: tuple[str, ...] = ()
    make: Callable[..., Tensor] | None = None
    draws: bool = False
    pools: bool = False


_AVERAGE = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"


def _divided(divisor: Tensor, x: Tensor) -> Tensor:
    return x / divisor


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _glu(x: Tensor, dim: int) -> Tensor:
    return F.glu(x, signed(dim))


def _weight_norm(g: Tensor, v: Tensor, norms: Tensor, dim: int) -> Tensor:
    weight: Tensor = torch._weight_norm_interface(v, g, dim)[0]
    return weight


def _normed_weight(g: Tensor, v: Tensor, dim: int) -> Tensor:
    v = v.view(*[1] * (dim - 1), *v.shape)
    sizes = [v.size(i) if i == dim else 1 for i in range(v.dim())]
    return _weight_norm(g.flatten()[: v.size(dim)].view(sizes), v, g, dim)


def _drop(_: Tensor, x: Tensor, p: float) -> Tensor:
    return torch.native_dropout(x, p, True)[0]


def _dropped(mask: Tensor, x: Tensor, p: float) -> Tensor:
    return x * mask * (1 / (1 - p))


def _pooled(x: Tensor, indices: Tensor) -> Tensor:
    # each index is that of a pixel in its image
    return x.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


def _max_pool(x: Tensor, _: Tensor) -> Tensor:
    return F.max_pool2d(x[None], 2)


def _average_pool(x: Tensor, kernel_size: tuple[int, int], **options: Any) -> Tensor:
    # the image has to be larger than the kernel
    return F.avg_pool2d(x[None].repeat(1, *kernel_size), kernel_size, **options)


POINTWISE_NODES: dict[str, Pointwise] = {
    "AbsBackward0": Pointwise(torch.abs),
    "AvgPool2DBackward0": Pointwise(F.avg_pool2d, options=_AVERAGE, make=_average_pool, pools=True),
    "ClampBackward1": Pointwise(torch.clamp, options=("min", "max")),
    "CosBackward0": Pointwise(torch.cos),
    "DivBackward0": Pointwise(_divided, 2),
    "GeluBackward0": Pointwise(_gelu, options=("approximate",)),
    "GluBackward0": Pointwise(_glu, options=("dim",)),
    "HardswishBackward0": Pointwise(F.hardswish),
    "LeakyReluBackward0": Pointwise(F.leaky_relu, options=("negative_slope",)),
    "LogBackward0": Pointwise(torch.log),
    "MaxPool2DWithIndicesBackward0": Pointwise(_pooled, 2, make=_max_pool, pools=True),
    "MishBackward0": Pointwise(F.mish),
    # for a product with a dropout's mask, the net adds the tensor that was multiplied with it
    "MulBackward0": Pointwise(torch.mul, 2),
    "NativeDropoutBackward0": Pointwise(_dropped, 2, ("p",), _drop, draws=True),
    "PowBackward0": Pointwise(torch.pow, options=("exponent",)),
    "SiluBackward0": Pointwise(F.silu),
    "SinBackward0": Pointwise(torch.sin),
    "SoftplusBackward0": Pointwise(F.softplus, options=("beta", "threshold")),
    # in this op all inputs are parameters; it also saves the norms, which are its second result
    "WeightNormInterfaceBackward0": Pointwise(_weight_norm, 3, ("dim",), _normed_weight),
}


def pointwise(node: Any) -> Pointwise | None:
    """The row of the table for a node. None if the table has none for it, or if there is no node."""
    row = POINTWISE_NODES.get(type(node).__name__)
    return None if row is not None and row.pools and set(node._saved_stride) != {1} else row


def gathered_from(node: Any) -> tuple[Any, int] | None:
    """The node, and which of its outputs, from which a node gathered rows by one index tensor; None for other nodes.

    Batched experts gather weights so, and an embedding, for example of relative positions for each pair of tokens.
    """
    kind = type(node).__name__
    if kind != "EmbeddingBackward0" and (kind != "IndexBackward0" or len(node._raw_saved_indices) != 1):
        return None
    source: tuple[Any, int] | None = node.next_functions[0] if node.next_functions else None
    return None if source is None or source[0] is None else source


def rows(weight: Tensor, index: Tensor) -> Tensor:
    """Recompute function of rows that were taken from a weight by indices."""
    return weight[index]


def computation(row: Pointwise, node: Any) -> Callable[..., Tensor]:
    """The function that makes a node's output from the tensors that the node saves."""
    return partial(row.compute, **_options(row, node)) if row.options else row.compute


def _options(row: Pointwise, node: Any) -> dict[str, Any]:
    return {name: getattr(node, f"_saved_{name}") for name in row.options}


_proved: dict[tuple[Any, ...], bool] = {}


def proved(node: Any, row: Pointwise, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `computation` gives a node's output bit by bit. It is tried once per kind of node, dtype and device.

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
    drawing_on = [numbers.device] if numbers.is_cuda else []
    leaves = [numbers.clone().requires_grad_(), numbers.flip(0).contiguous().requires_grad_()][: row.tensors]
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x.detach())
        return x.detach()

    try:
        with (
            torch.enable_grad(),
            torch.random.fork_rng(drawing_on, enabled=row.draws),
            saved_tensors_hooks(pack, lambda x: x),
        ):
            y = (row.make or row.compute)(*leaves, **options)
        sources = [*saved, leaves[-1].detach()] if row.draws else saved
        with torch.no_grad():
            again = row.compute(*sources, **options)
    except (RuntimeError, TypeError, ValueError):
        return False
    same = type(y.grad_fn) is type(node) and len(sources) == row.tensors and again.dtype == y.dtype
    return same and torch.equal(again, y)
