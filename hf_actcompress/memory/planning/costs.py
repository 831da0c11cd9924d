"""What a way to keep a layer costs in time and in gradients. A model of a device, no measurement.

Time is counted against the layer's own forward and backward, 3 F with F = 2 P T + 4 S T h floating-point operations (P
weights, T tokens, S tokens of a sequence, width h):

| way | time |
|---|---|
| checkpoint | F again; without 4 S T h where attention's output is kept |
| compressed or offloaded checkpoint | F again, and its input packed and unpacked, or moved, as below |
| int8, fp8, int4 | the tensor is read and written twice over, once to pack and once to unpack: 2 (raw + packed) bytes |
| of attention's tensors, on a device | its products again, 4 S T h |
| offload | what its copies take longer than the computation beside them (below), and the raw bytes read and written |

Copies to the host run beside the layer's forward, F, and copies back beside its backward, 2 F: each way costs what it
takes longer than that.

Gradients: the relative error that the codec leaves in normal numbers, measured when it is asked for. It is averaged
over norm, MLP and attention tensors, and over the layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ...codecs import CODECS

# tensors of which each has a codec
GROUPS = ("norm", "mlp", "attention")


@dataclass(frozen=True)
class DeviceModel:
    """The published figures of a device; only their ratios matter. By default an A100's with PCIe 4.

    Args:
        flops: Operations per second of half-precision matrix products.
        bandwidth: Of its memory, bytes per second.
        host_bandwidth: Of the link to the host's memory, bytes per second.
    """

    flops: float = 312e12
    bandwidth: float = 2.0e12
    host_bandwidth: float = 25e9


@dataclass(frozen=True)
class LayerWork:
    """The arithmetic of one layer's forward, in operations.

    Args:
        products: With the weights.
        attention: Of queries with keys and of probabilities with values.
    """

    products: float
    attention: float

    @property
    def forward(self) -> float:
        return self.products + self.attention


def checkpoint_time(work: LayerWork, attention_again: bool = True) -> float:
    """Extra time of a checkpointed layer as a fraction of its forward and backward."""
    return (work.forward if attention_again else work.products) / (3 * work.forward)


def storage_time(
    work: LayerWork, raw: dict[str, int], packed: dict[str, int], offloaded: set[str], device: DeviceModel
) -> float:
    """Extra time of a layer whose tensors are packed, as a fraction of its forward and backward.

    Args:
        work: Of the layer.
        raw, packed: Bytes by group, of those that are packed.
        offloaded: The groups of them that go to the host.
        device: Where.
    """
    forward = work.forward / device.flops
    moved = sum(raw[g] for g in offloaded)
    packing = sum(2 * (raw[g] + packed[g]) for g in raw if g not in offloaded)
    seconds = (packing + 2 * moved) / device.bandwidth
    if "attention" in raw:
        seconds += work.attention / device.flops
    # both ways run beside the computation: backward begins the copies of what it will read next
    transfer = moved / device.host_bandwidth
    seconds += max(0.0, transfer - forward) + max(0.0, transfer - 2 * forward)
    return seconds / (3 * forward)


@cache
def codec_error(name: str) -> float:
    """Relative error (root mean square) of a codec on normal numbers, [64, 1024] in fp32."""
    codec = CODECS[name]
    if codec.lossless:
        return 0.0
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return float((codec.unpack(*codec.pack(x)) - x).norm() / x.norm())
