"""Parametrizations of torch, which PEFT registers for each call of experts that it adapts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

_SEEN = "actcompress_seen"


def registered_without_writing(parametrizations: Any) -> None:
    """Take the registration of a parametrization off the version counter of its parameter, once per registration.

    A registration sets the parameter to the data that it has. The version counter counts that as a write in place, so
    each call of a module of PEFT would look as if it had changed what an earlier call kept.
    """
    if _SEEN not in vars(parametrizations):
        vars(parametrizations)[_SEEN] = True
        x = parametrizations.original
        counted = _counted_writes(torch.__future__.get_swap_module_params_on_conversion())
        torch._C._autograd._unsafe_set_version_counter((x,), (x._version - counted,))


@cache
def _counted_writes(swapping: bool) -> int:
    """What a registration adds to the version counter; `swapping` is torch's setting for all conversions."""
    # no layer of torch, whose weights would be drawn from the user's generator
    module, weight = nn.Module(), nn.Parameter(torch.zeros(1, device="cpu"))
    module.weight = weight
    before = weight._version
    register_parametrization(module, "weight", nn.Identity())
    return weight._version - before
