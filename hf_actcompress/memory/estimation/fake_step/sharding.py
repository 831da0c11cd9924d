"""A model sharded over several processes by `fully_shard` (FSDP2), in one process that stands for each of them.

The collectives are those of torch's fake process group: they move no data, and everything around them is as in a real
training. What a backend allocates for itself inside a collective is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from ....errors import ModelConfigError
from ....models.checkpointing import checkpointable
from ....private_apis import FakeTensorMode, fake_process_store
from .fake_allocator import FakeAllocator


@contextmanager
def process_group(ranks: int) -> Iterator[DeviceMesh]:
    """A group of so many processes, in which this process is the first.

    Raises:
        ModelConfigError: This process belongs to a group already.
    """
    if not dist.is_available() or dist.is_initialized():
        raise ModelConfigError(
            "an estimate for several processes makes a group of its own, and this process is in one already (or torch "
            "has no distributed package): estimate before the training starts, in a process of its own"
        )
    dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_process_store())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@contextmanager
def sharded(model: nn.Module, mode: FakeTensorMode, ranks: int, mixed: torch.dtype | None) -> Iterator[None]:
    """Shard each layer, then the rest, as accelerate's transformer wrap policy does. The model stays sharded.

    Args:
        model: The model on fake tensors.
        mode: The FakeTensorMode of its tensors.
        ranks: Number of processes; 1: nothing is done.
        mixed: Dtype in which gathered weights are used and gradients are reduced; None: their own.

    Raises:
        ModelConfigError: Weights are quantised, or this process belongs to a group already.
    """
    if ranks == 1:
        yield
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not all(p.is_floating_point() for p in model.parameters()):
        raise ModelConfigError("an estimate for several processes is not made for quantised weights")
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=mixed)
    modules = dict(model.named_modules())
    with process_group(ranks) as mesh:
        with mode:
            for part in (*(modules[name] for name in checkpointable(model)), model):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        yield


def local(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The part of each tensor that this process holds."""
    return (x.to_local() if isinstance(x, DTensor) else x for x in tensors)


def share(p: Tensor, ranks: int) -> Tensor:
    """The largest share of a parameter that any process holds, some rows of its first dimension; on the meta device."""
    rows = -(-p.size(0) // ranks) if p.dim() else 1
    return torch.empty((rows, *p.shape[1:]) if p.dim() else (), dtype=p.dtype, device="meta")


@contextmanager
def resizes_counted(allocator: FakeAllocator) -> Iterator[None]:
    """Count what FSDP frees and allocates: it resizes storages of gathered weights, which no op of torch shows."""
    stock = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        result = stock(storage, nbytes)
        allocator.resized(storage, nbytes)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = stock  # type: ignore[method-assign]
