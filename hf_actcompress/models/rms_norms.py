"""RMSNorms, of which transformers has some 140 classes: recognised by what they compute, not by their name."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import CODECS
from ..config import CompressionConfig
from ..modules.base import Settings
from ..modules.leaves import RMSNormMixin
from ..reference import RMS_NORM_VARIANTS, rms_norm_fwd, rms_norm_output_reasons
from .sites import Declined, Site, norm_keeps

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def find_rms_norm(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a module that has at most a 1-d weight and an eps and whose forward is bit-equal to a variant."""
    if not _looks_like_one(module):
        return None
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if eps_name is None and isinstance(module, nn.RMSNorm):
        # torch's own may leave its eps at None
        eps_name = "eps"
    if eps_name is None:
        return Declined("norm", f"no eps found under {', '.join(EPS_NAMES)}")
    variant = _variant(module, eps_name)
    if variant is None:
        return Declined("norm", "its forward is none of the known RMSNorm variants (found by a numeric probe)")
    settings = Settings("norm", variant, (eps_name,), CODECS[config.norm])
    reasons = rms_norm_output_reasons(module._parameters.get("weight"), variant)
    return Site(RMSNormMixin, norm_keeps(settings, config, reasons))


def _looks_like_one(module: nn.Module) -> bool:
    names = [name for name, value in module._parameters.items() if value is not None]
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, nn.LayerNorm)
        and not module._modules
        and names in ([], ["weight"])
        and (weight is None or weight.dim() == 1)
    )


def _variant(module: nn.Module, eps_name: str) -> str | None:
    """The variant whose values equal the module's bit by bit, on a stand-in weight, in every dtype it may meet."""
    weight = module._parameters.get("weight")
    dtype = weight.dtype if weight is not None else torch.float32
    device = weight.device if weight is not None else torch.device("cpu")
    # ZeRO-3 may have left an empty tensor here, and says how many elements there are
    width = int(getattr(weight, "ds_numel", weight.numel())) if weight is not None else 64
    if width == 0:  # on which every variant is the same
        return None
    generator = torch.Generator().manual_seed(0)
    probe = copy.copy(module)
    probe._parameters = {}
    stand_in: Tensor | None = None
    if weight is not None:
        stand_in = (1 + 0.5 * torch.randn(width, generator=generator)).to(device=device, dtype=dtype)
        probe._parameters["weight"] = nn.Parameter(stand_in, requires_grad=False)
    xs = [3 * torch.randn(5, width, generator=generator) + 0.3 for _ in range(2)]
    inputs = [xs[0].to(device=device, dtype=dtype), xs[1].to(device=device, dtype=torch.float32)]
    for variant in RMS_NORM_VARIANTS:
        if all(_equal(probe, x, stand_in, getattr(module, eps_name), variant) for x in inputs):
            return variant
    return None


@torch.no_grad()
def _equal(probe: Any, x: Tensor, weight: Tensor | None, eps: float | None, variant: str) -> bool:
    try:
        # not called: the user's hooks are not for our probe
        stock = type(probe).forward(probe, x)
    except (RuntimeError, ValueError, TypeError, AttributeError):  # not callable on one tensor: not an RMSNorm
        return False
    ours, _ = rms_norm_fwd(x, weight, eps, variant)
    return isinstance(stock, Tensor) and stock.dtype == ours.dtype and torch.equal(stock, ours)
