"""RMSNorms, of which transformers has some 140 classes: recognised by what they compute, not by their name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..methods.norm_output.reference import rms_norm_output_reasons
from ..modules.leaves import RMSNormMixin, RMSNormSettings
from ..reference import RMS_NORM_FORMULAS, rms_norm_fwd
from ..roles import Role
from .probe import DTYPES, asked_once, bare_copy, probe_rows, same_bits, takes_one_tensor, undisturbed
from .sites import Declined, Site, norm_keeps

# dtypes of input and weight; None for the weight of a norm without one
Pair = tuple[torch.dtype, torch.dtype | None]

EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")


def find_rms_norm(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a module that has at most a 1-d weight and an eps and whose forward is bit-equal to a formula."""
    if not _looks_like_one(module):
        return None
    eps_name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), None)
    if eps_name is None and isinstance(module, nn.RMSNorm):
        # the eps of torch's own RMSNorm may be None
        eps_name = "eps"
    if eps_name is None:
        return Declined(Role.NORM, f"no eps found under {', '.join(EPS_NAMES)}")
    if not takes_one_tensor(module):
        return Declined(Role.NORM, "its forward takes more than one argument (a gate, a residual)")
    formula, pairs = asked_once(module, _formula, eps_name)
    if formula is None:
        return Declined(Role.NORM, "its forward is none of the known RMSNorm formulas (found by a numeric probe)")
    has_weight = module._parameters.get("weight") is not None
    settings = RMSNormSettings(
        Role.NORM, formula, CODECS[config.norm], eps_name=eps_name, has_weight=has_weight, pairs=pairs
    )
    reasons = rms_norm_output_reasons(module._parameters.get("weight"), formula)
    return Site(RMSNormMixin, norm_keeps(settings, config, reasons))


def _looks_like_one(module: nn.Module) -> bool:
    names = [name for name, value in module._parameters.items() if value is not None]
    weight = module._parameters.get("weight")
    return (
        "norm" in type(module).__name__.lower()
        and not isinstance(module, nn.LayerNorm)
        and not module._modules
        and not module._buffers
        and names in ([], ["weight"])
        and (weight is None or weight.dim() == 1)
    )


def _formula(module: nn.Module, eps_name: str) -> tuple[str | None, frozenset[Pair] | None]:
    """The formula whose values equal the module's bit by bit in its own dtype and most others, and those dtypes.

    The dtypes are None if the formula holds in all of them.
    """
    weight = module._parameters.get("weight")
    # ZeRO-3 may have left an empty tensor here, and says how many elements there are
    width = int(getattr(weight, "ds_numel", weight.numel())) if weight is not None else 64
    if width == 0:  # without elements all formulas agree
        return None, None
    stock = _stock_values(module, weight, width)
    own = weight.dtype if weight is not None else None
    best, most = None, frozenset[Pair]()
    for formula in RMS_NORM_FORMULAS:
        eps = getattr(module, eps_name)
        with undisturbed():
            ours = {pair: rms_norm_fwd(x, gain, eps, formula)[0] for pair, (x, gain, _) in stock.items()}
        pairs = frozenset(pair for pair, y in ours.items() if same_bits(y, stock[pair][2]))
        has_own = any(gain == own and (own is None or x == own) for x, gain in pairs)
        if has_own and len(pairs) > len(most):
            best, most = formula, pairs
    every = len(DTYPES) if weight is None else len(DTYPES) ** 2
    return best, None if len(most) == every else most


def _stock_values(
    module: nn.Module, weight: Tensor | None, width: int
) -> dict[Pair, tuple[Tensor, Tensor | None, Tensor]]:
    """Input, stand-in weight and output of the module's own forward, for each pair of dtypes that it takes."""
    device = weight.device if weight is not None else torch.device("cpu")
    rows = probe_rows(width).to(device)
    gain = 1 + 0.5 * torch.randn(width, generator=torch.Generator().manual_seed(1)).to(device)
    found: dict[Pair, tuple[Tensor, Tensor | None, Tensor]] = {}
    for weight_dtype in DTYPES if weight is not None else (None,):
        stand_in = gain.to(weight_dtype) if weight_dtype is not None else None
        probe = bare_copy(module)
        if stand_in is not None:
            probe._parameters = {**module._parameters, "weight": nn.Parameter(stand_in, requires_grad=False)}
        for dtype in DTYPES:
            x = rows.to(dtype)
            try:
                with undisturbed():
                    # the module is not called, because the user's hooks must not see our probe
                    y = type(probe).forward(probe, x.clone())
            except Exception:
                continue
            if isinstance(y, Tensor):
                found[dtype, weight_dtype] = x, stand_in, y
    return found
