"""What one way to keep a layer costs in time and in gradient error. It is a model of a device; nothing is measured.

Time is a fraction of the layer's own forward F and backward B, in floating-point operations that are counted op by op
(`estimation/fake_step/arithmetic.py`). B is 2 F if all weights are trained, and little more than F if they are frozen:

| way | time |
|---|---|
| checkpoint | F again; without attention's products A where its output is kept |
| compressed or offloaded checkpoint | F again, and its input is packed and unpacked, or moved, as below |
| int8, fp8, int4 | packing and unpacking each read one form and write the other: 2 (raw + packed) bytes |
| attention's tensors on a device | its products are recomputed, A |
| offload | the raw bytes are read and written, and the copies take longer than what runs beside them (below) |

Copies to the host run beside the layer's forward, F, and copies back run beside its backward, B. Only the time by
which a copy is longer than what it runs beside is counted.

Gradient error: the relative error that the codec leaves in normally distributed numbers. It is measured when it is
asked for, and averaged over norm, MLP and attention tensors, and over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...codecs.table import CODECS
from ..estimation.fake_step.arithmetic import Work

# groups of tensors; each group has its own codec
GROUPS = ("norm", "mlp", "attention")


@dataclass(frozen=True)
class DeviceModel:
    """The published figures of a device; only their ratios matter. The defaults are those of an A100 with PCIe 4.

    Args:
        flops: Operations per second of half-precision matrix products.
        bandwidth: Bytes per second that the device's memory reads or writes.
        host_bandwidth: Bytes per second of the link to the host's memory.
    """

    flops: float = 312e12
    bandwidth: float = 2.0e12
    host_bandwidth: float = 25e9


def checkpoint_time(work: Work, attention_again: bool = True) -> float:
    """Extra time of a checkpointed layer as a fraction of its forward and backward."""
    return (work.forward if attention_again else work.products) / work.step


def storage_time(
    work: Work, raw: dict[str, int], packed: dict[str, int], offloaded: set[str], device: DeviceModel
) -> float:
    """Extra time of a layer whose tensors are packed, as a fraction of its forward and backward.

    Args:
        work: The layer's arithmetic.
        raw, packed: Bytes of the packed tensors by group, before and after packing.
        offloaded: The groups that go to host memory.
        device: The speeds to count with.
    """
    forward, backward = work.forward / device.flops, work.backward / device.flops
    moved = sum(raw[g] for g in offloaded)
    packing = sum(2 * (raw[g] + packed[g]) for g in raw if g not in offloaded)
    seconds = (packing + 2 * moved) / device.bandwidth
    if "attention" in raw:
        seconds += work.attention / device.flops
    # copies run beside the computation in both directions: backward starts the copies of what it will read next
    transfer = moved / device.host_bandwidth
    seconds += max(0.0, transfer - forward) + max(0.0, transfer - backward)
    return seconds / (forward + backward)


@cache
def codec_error(name: str) -> float:
    """Relative error (root mean square) that a codec leaves in normally distributed numbers, [64, 1024] in fp32."""
    codec = CODECS[name]
    if codec.lossless:
        return 0.0
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return float((codec.unpack(*codec.pack(x)) - x).norm() / x.norm())
