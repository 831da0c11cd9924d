"""What is held between the steps (weights, gradients, optimizer states), and the allowance for the device itself."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn

from ....records import storage_sizes
from ...measurement.saved_tensors import layer_names
from ..fake_step.setting import Setting
from ..fake_step.sharding import share
from ..reserved.replay import Held
from .optimizers import OptimizerRule

# an allowance that was not measured: the CUDA context, its loaded kernels, and the workspaces of cuBLAS
CONTEXT_BYTES = 640 * 2**20

# `gradient_as_bucket_view` is off by default, in torch and in accelerate; torch's documentation says what that costs
DDP_NOTE = (
    "the buckets of DistributedDataParallel are a second copy of all gradients; gradient_as_bucket_view=True saves that"
)
# modules/tiled.py leaves MLPs whole whose weights are there only while their module runs
TILES_NOTE = (
    "no MLP is computed in tiles where ZeRO-3 shards its weights: a preset with tiled_mlp (long) keeps there what it "
    "keeps without, and takes no further time"
)


class States(NamedTuple):
    """Bytes on one of the processes.

    Args:
        weights, gradients, optimizer: Bytes of these tensors, which are held both during and between the steps.
        optimizer_step: Temporary tensors of the optimizer's own step.
        workspace: What is held throughout a forward and backward.
        in_evaluation: What is held throughout an evaluation.
    """

    weights: int
    gradients: int
    optimizer: int
    optimizer_step: int
    workspace: int = 0
    in_evaluation: int = 0

    def at_peak(self, step_peak: int) -> int:
        """Bytes at the peak: the states, and the larger of two peaks: forward and backward, or the optimizer's step."""
        largest = max(step_peak + self.workspace, self.optimizer_step)
        return self.weights + self.gradients + self.optimizer + largest


def state_bytes(whole: nn.Module, setting: Setting, rule: OptimizerRule) -> States:
    """Bytes of weights and buffers, of gradients, and of the optimizer's states and step."""
    parameters: list[Tensor] = list(whole.parameters())
    if setting.ranks > 1:
        parameters = [share(p, setting.ranks).requires_grad_(p.requires_grad) for p in parameters]
    trained = [p for p in parameters if p.requires_grad]
    states = rule.of_model(whole, lambda p: share(p, setting.ranks) if setting.ranks > 1 else p)
    return States(
        sum(map(setting.rounded, storage_sizes(chain(parameters, whole.buffers())).values())),
        sum(setting.rounded(p.nbytes) for p in trained),
        sum(map(setting.rounded, states)),
        sum(map(setting.rounded, rule.step(trained, setting.cuda))),
    )


def held_by(whole: nn.Module, rule: OptimizerRule) -> Held:
    """The tensors that a training on one device allocates beside those of its steps, one by one."""
    trained = [p for p in whole.parameters() if p.requires_grad]
    return Held(
        list(storage_sizes(chain(whole.parameters(), whole.buffers())).values()),
        list(rule.of_model(whole)),
        list(rule.step(trained, True)),
    )


def context_bytes(setting: Setting) -> int:
    """The allowance in bytes for what a device takes beside tensors."""
    return CONTEXT_BYTES if setting.cuda else 0


def frozen_elsewhere(whole: nn.Module) -> int:
    """Bytes of the layers' frozen weights, without those of the two largest layers: one in use, one being copied."""
    layers = (whole.get_submodule(name) for name in layer_names(whole))
    frozen = [storage_sizes(p for p in layer.parameters() if not p.requires_grad) for layer in layers]
    return sum(sorted(sum(sizes.values()) for sizes in frozen)[:-2])
