"""Subclasses of nn.Linear with a forward of their own: stock's code runs, and is treated as a product with a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import CompressionConfig
from ..modules.base import Settings
from ..modules.leaves import OwnLinearMixin
from ..roles import Role
from .probe import REFUSALS, undisturbed
from .sites import Declined, Site


def find_own_linear(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of such a layer of transformers that computes ``x @ weight.T (+ bias)``; why not; None for others."""
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return None
    ours = type(module).__module__.startswith("transformers.models.") and config.selective and config.net
    if ours and config.derive_linear and _is_linear(module):
        return Site(OwnLinearMixin, Settings(Role.OWN_LINEAR, keeps="what its own code keeps"))
    return Declined(Role.LINEAR, f"{type(module).__name__} is a subclass of nn.Linear with a forward of its own")


def _is_linear(module: nn.Linear) -> bool:
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.dim() != 2 or not weight.numel():
        return False
    try:
        with undisturbed():
            x = torch.linspace(-1, 1, weight.size(1)).to(weight)[None]
            y = type(module).forward(module, x)
            expected = nn.functional.linear(x, weight, module.bias)
    except REFUSALS:
        return False
    return isinstance(y, Tensor) and y.shape == expected.shape and torch.allclose(y, expected, rtol=0.02, atol=0.02)
