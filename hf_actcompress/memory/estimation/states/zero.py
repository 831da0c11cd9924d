"""One process of several under DeepSpeed's ZeRO, by arithmetic: DeepSpeed is not run, and no run was measured.

The rules are DeepSpeed's documented behaviour with its defaults, in elements. N: processes. n: trained elements.

| what | stage 2 | stage 3 | option of DeepSpeed |
|---|---|---|---|
| weights | whole | 1/N of those above 100,000 elements | `stage3_param_persistence_threshold` |
| gradients | n/N in the weights' dtype | the same | |
| trained weights once more, in fp32 | n/N | n/N | |
| optimizer's states, of a flat tensor in fp32 | of n/N | of n/N | |
| a bucket of gradients | 5e8 in a backward | 5e8 at all times | `reduce_bucket_size`, `contiguous_gradients` |
| gathered weights | | up to 1e9, including prefetched ones | `stage3_max_live_parameters` |
| gradients in fp32, in the optimizer's step | n/N, and a flat copy of them | at most 1e9 | `sub_group_size` |
| updated weights | gathered in place | | `allgather_bucket_size` |

With "auto", which the Trainer fills in, a bucket has hidden_size^2 elements, which is less. All weights have one dtype:
under `bf16` or `fp16` DeepSpeed holds all of them in that dtype, without autocast. What NCCL takes is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from ....errors import ModelConfigError
from ....quick.sizes import readable_size
from ....records import storage_sizes
from ...measurement.saved_tensors import layer_names
from ..fake_step.setting import Setting
from .held import States
from .optimizers import OptimizerRule

STAGES = (2, 3)
_BUCKET, _LIVE, _PERSISTENT, _SUB_GROUP = 5 * 10**8, 10**9, 10**5, 10**9


@dataclass(frozen=True)
class Zero:
    """How ZeRO divides a model: in stage 2 or 3, among 2 or more processes."""

    stage: int
    processes: int

    def __post_init__(self) -> None:
        if self.stage not in STAGES or self.processes < 2:
            raise ModelConfigError(
                f"zero is a stage of ZeRO, 2 or 3, over 2 or more processes (processes=8, --processes 8); got stage "
                f"{self.stage} over {self.processes}"
            )

    def prepare(self, model: nn.Module) -> None:
        """Give all weights of a model on the meta device one dtype, as DeepSpeed does.

        Raises ModelConfigError if quantised weights would have to be divided.
        """
        floating = [p for p in model.parameters() if p.is_floating_point()]
        if self.stage == 3 and len(floating) < len(list(model.parameters())):
            raise ModelConfigError("an estimate of ZeRO-3 is not made for quantised weights; zero=2 leaves them whole")
        model.to(max(floating, key=Tensor.numel).dtype)

    def states(self, model: nn.Module, setting: Setting, rule: OptimizerRule) -> States:
        """Bytes on the process with the largest shares."""
        trained = [p for p in model.parameters() if p.requires_grad]
        itemsize = max((p.itemsize for p in trained), default=0)
        part = self._share(sum(p.numel() for p in trained))
        flat = torch.empty(part, dtype=torch.float32, device="meta")
        bucket = _BUCKET * itemsize
        if self.stage == 2:
            in_step = [4 * part, itemsize * part] if itemsize < 4 else [4 * part]
        else:
            in_step = [4 * min(part, _SUB_GROUP), bucket]
        gathered = self._gathered(model)
        return States(
            sum(map(setting.rounded, self._weights(model))),
            setting.rounded(itemsize * part),
            setting.rounded(flat.nbytes) + sum(map(setting.rounded, rule.states(flat))),
            sum(map(setting.rounded, chain(in_step, rule.step([flat], setting.cuda)))),
            bucket + gathered,
            gathered + (bucket if self.stage == 3 else 0),
        )

    def note(self, states: States) -> str:
        """The note that is printed below an estimate."""
        return (
            f"one of {self.processes} processes under ZeRO-{self.stage} by DeepSpeed's documented defaults, not "
            f"measured: {readable_size(states.workspace)} of the peak are its bucket of gradients"
            + (" and gathered weights" if self.stage == 3 else "")
            + '; "auto" in a config for the Trainer makes the bucket hidden_size^2 elements'
        )

    def _share(self, count: int) -> int:
        return -(-count // self.processes)

    def _is_divided(self, p: Tensor) -> bool:
        return self.stage == 3 and p.numel() > _PERSISTENT

    def _weights(self, model: nn.Module) -> list[int]:
        whole = [p for p in model.parameters() if not self._is_divided(p)]
        divided = [p for p in model.parameters() if self._is_divided(p)]
        sizes = storage_sizes([*whole, *model.buffers()]).values()
        return [*sizes, *(self._share(p.numel()) * p.itemsize for p in divided)]

    def _gathered(self, model: nn.Module) -> int:
        """The most bytes of weights that are whole at the same time; at least those of one layer."""
        if self.stage != 3:
            return 0
        layers = [model.get_submodule(name) for name in layer_names(model)]

        def elements(module: nn.Module) -> int:
            return sum(p.numel() for p in module.parameters() if self._is_divided(p))

        largest = max(model.parameters(), key=Tensor.numel)
        live = max([_LIVE, largest.numel(), *map(elements, layers)])
        return min(elements(model), live) * largest.itemsize
