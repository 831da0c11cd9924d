"""Modules without a rule that are a cheap function of one tensor: norms and activations of a model's own making.

Their formula need not be known, because their own code runs again in backward. A probe shows that it may
run again: it draws no random numbers, writes into no input and multiplies no matrices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import Settings
from ..modules.recomputed import BatchNormMixin, RecomputedMixin
from ..records import storage_sizes
from ..roles import Role
from .probe import DTYPES, bare_copy, probe_rows, same_bits, takes_one_tensor, undisturbed
from .sites import Site

# ops that are as cheap as pointwise ones, beside those that torch tags as pointwise and views
_CHEAP = {
    "_fused_rms_norm", "_prelu_kernel", "_softmax", "_to_copy", "amax", "amin", "cat", "clone", "copy_", "detach",
    "empty_like", "full_like", "gelu", "glu", "lift_fresh", "linalg_vector_norm", "mean", "native_group_norm",
    "native_layer_norm", "new_zeros", "ones_like", "std", "sum", "var", "var_mean", "zeros_like",
}  # fmt: skip
_WIDEST = 2**16
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def find_recomputed(module: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of a BatchNorm, or of a module that the probe lets through; None for all others."""
    if type(module) in _BATCH_NORMS:
        # torch's own node keeps the input, so a codec has no effect
        return Site(BatchNormMixin, Settings(Role.BATCH_NORM, "input")) if config.derive_linear else None
    if isinstance(module, PreTrainedModel) or not config.derive_linear or not _is_small(module):
        return None
    if not any(_may_run_again(module, x) and _is_worth_it(module, x) for x in _shapes(module)):
        return None
    codec = CODECS[config.norm if module._parameters else config.mlp]
    return Site(RecomputedMixin, Settings(Role.RECOMPUTED, "input", codec))


def _is_small(module: nn.Module) -> bool:
    """Whether it has vectors for weights and single numbers for constants, and a forward that takes one tensor."""
    children = [child for child in module.modules() if child is not module]
    if any(child._parameters or child._buffers or type(child).forward is nn.Module.forward for child in children):
        return False
    vectors = all(p is None or _is_vector(p) for p in module._parameters.values())
    numbers = all(b is None or b.numel() == 1 for b in module._buffers.values())
    own = type(module).forward is not nn.Module.forward
    return vectors and own and numbers and takes_one_tensor(module)


def _is_vector(weight: Tensor) -> bool:
    """Whether one dimension alone is larger than 1. An empty parameter is sharded (ZeRO-3)."""
    return 0 < weight.numel() == max(weight.shape, default=1)


def _shapes(module: nn.Module) -> list[Tensor]:
    """Inputs [1, M, C], [1, C, 3, 3] and [1, 3, 3, C], of rows and of images, for the widths that it may have."""
    vectors = {p.numel() for p in module._parameters.values() if p is not None}
    said = [x[-1] if isinstance(x, tuple) and x else x for name, x in vars(module).items() if not name.startswith("_")]
    widths = [max(vectors)] if vectors else [24, *(x for x in said if type(x) is int and 2 < x <= _WIDEST)]
    rows = [probe_rows(width) for width in widths]
    return [*rows, *(x.transpose(1, 2).reshape(1, -1, 3, 3) for x in rows), *(x.view(1, 3, 3, -1) for x in rows)]


class _CheapOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at an op that is not cheap; counts those that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pointwise = torch.Tag.pointwise in func.tags
        if not (pointwise or func.is_view or func.overloadpacket.__name__ in _CHEAP):
            raise RuntimeError(f"{func} is not cheap")
        self.computed += not func.is_view
        return func(*args, **(kwargs or {}))


def _may_run_again(module: nn.Module, x: Tensor) -> bool:
    """Whether a second call gives the same bits, out of cheap ops that write into no input, in every dtype."""
    probe = _probe(module)
    constants = dict(probe._buffers)
    seen: Any = _CheapOnly()
    try:
        for dtype in DTYPES:
            given = x.to(dtype)
            kept = given.clone()
            with undisturbed(), seen:
                first = probe(given)
            with undisturbed():
                second = probe(given)
            if any(probe._buffers[name] is not b or (b is not None and b._version) for name, b in constants.items()):
                return False
            if not same_bits(first, second) or not same_bits(given, kept) or not first.is_floating_point():
                return False
            if first.untyped_storage()._cdata == given.untyped_storage()._cdata or first.numel() != _held_by(first):
                return False
    except Exception:
        return False
    return bool(seen.computed)


def _held_by(x: Tensor) -> int:
    """The number of elements in the memory of x, which a view of a part of it holds, too."""
    return x.untyped_storage().nbytes() // x.element_size()


def _is_worth_it(module: nn.Module, x: Tensor) -> bool:
    """Whether stock keeps at least the size of the input for backward (a mean, for example, keeps nothing), and a copy
    reads its own weights. A method that is kept as an attribute (``self.run = self.native``) reads the original's.
    """
    sizes: dict[int, int] = {}

    def pack(saved: Tensor) -> Tensor:
        if not isinstance(saved, nn.Parameter):
            sizes.update(storage_sizes([saved]))
        return saved.detach()

    probe = _probe(module)
    weights = [p.requires_grad_() for p in probe._parameters.values() if p is not None]
    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda saved: saved):
            y = probe(x.clone().requires_grad_())
        found = torch.autograd.grad(y, weights, torch.ones_like(y), allow_unused=True) if weights else ()
    except Exception:
        return False
    return sum(sizes.values()) >= x.nbytes and y.requires_grad and not any(g is None for g in found)


def _probe(module: nn.Module) -> Any:
    """The module in training mode, on the CPU, without hooks."""
    probe = bare_copy(module)
    probe._parameters = {
        name: None if p is None else nn.Parameter(torch.ones(p.shape, dtype=p.dtype), requires_grad=False)
        for name, p in module._parameters.items()
    }
    probe._buffers = {name: None if b is None else b.detach().clone() for name, b in module._buffers.items()}
    return probe.train() if not module._modules else probe
