"""What is held between the steps: weights, gradients, optimizer states; and the allowance for the device itself."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

from ...records import storage_sizes
from ..measurement.saved_tensors import layer_names
from .fake_step.setting import Setting
from .fake_step.sharding import share
from .optimizers import OptimizerRule

# an allowance and no measurement: the CUDA context, its loaded kernels, and the workspaces of cuBLAS
CONTEXT_BYTES = 640 * 2**20


def state_bytes(whole: nn.Module, setting: Setting, rule: OptimizerRule) -> tuple[int, int, int]:
    """Bytes of weights and buffers, gradients and optimizer states, on one of the processes."""
    parameters: list[Tensor] = list(whole.parameters())
    if setting.ranks > 1:
        parameters = [share(p, setting.ranks).requires_grad_(p.requires_grad) for p in parameters]
    trained = [p for p in parameters if p.requires_grad]
    return (
        sum(map(setting.rounded, storage_sizes(chain(parameters, whole.buffers())).values())),
        sum(setting.rounded(p.nbytes) for p in trained),
        sum(setting.rounded(size) for p in trained for size in rule.states(p)),
    )


def context_bytes(setting: Setting) -> int:
    """The allowance for what a device takes beside tensors."""
    return CONTEXT_BYTES if setting.cuda else 0


def frozen_elsewhere(whole: nn.Module) -> int:
    """Bytes of the layers' frozen weights without those of the two largest: one is used, the next one is on its way."""
    layers = (whole.get_submodule(name) for name in layer_names(whole))
    frozen = [storage_sizes(p for p in layer.parameters() if not p.requires_grad) for layer in layers]
    return sum(sorted(sum(sizes.values()) for sizes in frozen)[:-2])
