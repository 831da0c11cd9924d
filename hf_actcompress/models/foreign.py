"""Modules that no rule knows and that keep activations of their own: named in the report, and left alone.

They are found by their structure, because a report has no batch on which it could measure them.
"""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList
from transformers import PreTrainedModel

from ..private_apis import BatchNormBase, ConvolutionBase
from ..roles import Role
from .sites import Declined
from .source import names_in

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict, ParametrizationList)
_NORMS = (BatchNormBase, nn.GroupNorm, nn.LocalResponseNorm)
# functions that keep their input, their output or a mask if code calls them outside of a patched module
_KEEPING = frozenset(
    {
        "baddbmm", "bmm", "conv1d", "conv2d", "cumprod", "cumsum", "dropout", "einsum", "elu", "exp", "gelu",
        "grouped_mm", "layer_norm", "leaky_relu", "logsumexp", "matmul", "relu", "relu_", "rms_norm", "rsqrt",
        "scaled_dot_product_attention", "sigmoid", "silu", "softmax", "softplus", "tanh",
    }
)  # fmt: skip
_SAME = "stock's code runs; where its layer runs by a plan, the plan decides what is kept of it"
_LOOP = "stock's code runs; a loop over experts has no plan: model.set_experts_implementation('grouped_mm') keeps less"


def find_foreign(module: nn.Module) -> Declined | None:
    """Why a module without a rule is left alone; None for one that keeps nothing itself: its children have rows."""
    if isinstance(module, (PreTrainedModel, nn.Embedding, *_CONTAINERS)) or type(module) is nn.Identity:
        return None
    if isinstance(module, ConvolutionBase):
        return Declined(Role.CONV, f"no rule for {type(module).__name__}: {_SAME}")
    if isinstance(module, _NORMS):
        return Declined(Role.NORM, f"no rule for {type(module).__name__}: {_SAME}")
    parameters = [p for p in module._parameters.values() if p is not None]
    # experts have one weight each; class tokens and position embeddings have one row
    if sum(p.dim() > 2 and p.size(0) > 1 for p in parameters) > 1:
        loop = getattr(getattr(module, "config", None), "_experts_implementation", None) == "eager"
        return Declined(
            Role.EXPERTS, f"no rule for fused weights ({type(module).__name__}): {_LOOP if loop else _SAME}"
        )
    # a name may be that of a child, for which the report has a row of its own
    functions = tuple(name for name in sorted(names_in(module) & _KEEPING) if name not in module._modules)
    if "attention" in type(module).__name__.lower() and functions:
        return Declined(Role.ATTENTION, f"computes attention itself, not through the attention interface: {_SAME}")
    if functions:
        return Declined(Role.FUNCTIONS, f"no rule for its own calls of {', '.join(functions)}: {_SAME}")
    if parameters and "norm" in type(module).__name__.lower():
        return Declined(Role.NORM, f"no rule for {type(module).__name__}: {_SAME}")
    return None
