"""Subclasses of nn.Linear with a forward of their own: stock's code runs, and is treated as a product with a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config import CompressionConfig
from ..modules.base import Settings
from ..modules.leaves import OwnLinearMixin
from ..private_apis import FakeTensor
from ..roles import Role
from .probe import shallow_copy, undisturbed
from .sites import Declined, Site

# features of a copy that a layer is tried on
_NARROW = 8


def find_own_linear(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of such a layer if transformers has it and it computes ``x @ weight.T (+ bias)``; else why not.

    None for other modules.
    """
    if not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return None
    ours = type(module).__module__.startswith("transformers.models.") and config.selective and config.net
    if ours and config.derive_linear and _is_linear(module):
        return Site(OwnLinearMixin, Settings(Role.OWN_LINEAR, keeps="what its own code keeps"))
    return Declined(Role.LINEAR, f"{type(module).__name__} is a subclass of nn.Linear with a forward of its own")


def _is_linear(module: nn.Linear) -> bool:
    if type(module.weight) is FakeTensor:
        module = _with_values(module)
    weight = module.weight
    if type(weight) is not nn.Parameter or weight.dim() != 2 or not weight.numel():
        return False
    if not module._parameters.keys() <= {"weight", "bias"}:
        # a scale may be 1 now, and is trained
        return False
    try:
        with undisturbed():
            x = torch.linspace(-1, 1, weight.size(1)).to(weight)[None]
            y = type(module).forward(module, x)
            expected = nn.functional.linear(x, weight, module.bias)
    except Exception:
        return False
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    # a router may return fp32, whatever its weight is
    return torch.allclose(y.to(expected), expected, rtol=0.02, atol=0.02)


def _with_values(module: nn.Linear) -> nn.Linear:
    """A narrow copy of a layer on fake tensors: what its code computes does not depend on how wide it is."""
    twin: nn.Linear = shallow_copy(module)
    of, outputs, inputs = module.weight.dtype, *(min(size, _NARROW) for size in module.weight.shape)
    values = {"weight": torch.linspace(-1, 1, outputs * inputs).view(outputs, inputs)}
    if module.bias is not None:
        values["bias"] = torch.linspace(0, 1, outputs)
    twin.__dict__["_parameters"] = {name: nn.Parameter(x.to(of)) for name, x in values.items()}
    twin._parameters.setdefault("bias", None)
    return twin
