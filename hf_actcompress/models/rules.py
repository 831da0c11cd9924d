"""From a module to its site: the first rule that knows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..config import CompressionConfig
from .adapters import find_adapter
from .attention import find_attention
from .experts import find_experts
from .gated_mlps import find_gated_mlp
from .leaves import find_leaf
from .recomputed import find_recomputed
from .rms_norms import find_rms_norm
from .sites import Declined, Site
from .tiled_mlps import find_tiled_mlp

Rule = Callable[[nn.Module, CompressionConfig], Site | Declined | None]

RULES: tuple[Rule, ...] = (
    find_leaf,
    find_rms_norm,
    find_gated_mlp,
    find_tiled_mlp,
    find_experts,
    find_attention,
    find_adapter,
)
# those of other packages, which are asked first
OTHERS_RULES: list[Rule] = []


def find_site(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """How `module` (not patched yet) is patched, why it is left alone, or None if it is no business of ours."""
    # the probes make small tensors, wherever `torch.set_default_device` would put them
    with torch.device("cpu"):
        found = _first(OTHERS_RULES, module, config)
        if found is not None:
            return _unless_forward_is_bound(module, found)
        found = _first(RULES, module, config)
        if not isinstance(found, Site):
            # what no rule knows may be cheap enough to run again
            found = find_recomputed(module, config) or found
    return None if found is None else _unless_forward_is_bound(module, found)


def _first(rules: Iterable[Rule], module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    return next((found for rule in rules if (found := rule(module, config)) is not None), None)


def _unless_forward_is_bound(module: nn.Module, found: Site | Declined) -> Site | Declined:
    if isinstance(found, Site) and "forward" in module.__dict__:
        return Declined(
            found.settings.role,
            "forward is already bound on the instance (device_map or offload hooks, Liger, hub kernels), so a class "
            "swap would be inert; patch before that is applied",
        )
    return found
