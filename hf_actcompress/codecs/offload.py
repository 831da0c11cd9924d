"""Host memory: what another codec packs, moved off the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..compiling import is_compiling
from ..reference.device_rules import device_rules
from ..reference.rng import Generators
from .codec import Codec
from .feature_maps import on_feature_maps
from .identity import Identity
from .prefetch import Lane, Tensors, Ticket

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OffloadedMeta:
    """The static half: the inner codec's, where its tensors come from, and their place in the order of leaving."""

    inner: object
    device: torch.device
    ticket: Ticket | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Offload(Codec):
    """Pack with another codec, then keep the bytes in host memory.

    From a CUDA device the copy goes to pinned memory on a side stream while the forward runs on, and comes back on the
    same stream: when backward asks for one activation, the copies of those that left before it are begun too
    (prefetch.py), and the backward waits for its own on the device and not on the host. Elsewhere it is a plain copy.
    With the identity inside, x must not be written in place before its copy is complete, which nothing checks. Other
    codecs copy tensors that they have made themselves.

    Bytes: none on the device, except up to eight activations in backward; in host memory those of the inner codec.
    Bias: the inner codec's.

    Args:
        inner: The codec that encodes the bytes before they are moved; it decides for which fields this one serves.
    """

    inner: Codec = field(default_factory=Identity)

    @property
    def linear_only(self) -> bool:
        return self.inner.linear_only

    @property
    def for_images(self) -> bool:
        return self.inner.for_images

    @property
    def along_tokens(self) -> bool:
        return self.inner.along_tokens

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    def on_feature_maps(self) -> Codec:
        return replace(self, inner=on_feature_maps(self.inner))

    @property
    def takes_rows(self) -> bool:
        return self.inner.takes_rows

    @property
    def bits(self) -> int | None:
        return self.inner.bits

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        tensors, meta = self.inner.pack(x)
        host = tuple(_to_host(t.detach()) for t in tensors)
        lane = None if is_compiling() else lane_of(x.device)
        return host, OffloadedMeta(meta, x.device, lane.leave(host) if lane is not None else None)

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        assert isinstance(meta, OffloadedMeta)
        return self.inner.unpack(_to_device(tensors, meta), meta.inner)

    def keeping_sign(self) -> Codec:
        return replace(self, inner=self.inner.keeping_sign())

    def has_grad_weight(self, dy: Tensor) -> bool:
        return self.inner.has_grad_weight(dy)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        assert isinstance(meta, OffloadedMeta)
        if not self.has_grad_weight(dy):
            # the tensors are not fetched here, because unpacking would fetch them a second time
            return None
        return self.inner.grad_weight(dy, _to_device(tensors, meta), meta.inner)

    def drawing_from(self, generators: Generators) -> Codec:
        inner = self.inner.drawing_from(generators)
        return self if inner is self.inner else replace(self, inner=inner)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.inner.nbytes(shape, dtype)


def _to_device(tensors: Tensors, meta: OffloadedMeta) -> Tensors:
    rules = device_rules()
    if rules is not None:
        return rules.to_device(tensors)
    lane = lane_of(meta.device) if meta.ticket is not None else None
    if lane is None or meta.ticket is None:
        return tuple(x.to(meta.device) for x in tensors)
    return lane.back(meta.ticket, tensors)


@cache
def lane_of(device: torch.device) -> Lane | None:
    """The activations of that device that are in host memory; None where copies do not run beside the computation."""
    return Lane(_SideStream(device)) if device.type == "cuda" else None


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _to_host(x: Tensor) -> Tensor:
    rules = device_rules()
    if rules is not None:
        return rules.to_host(x)
    if not x.is_cuda or is_compiling():
        # streams cannot be traced
        return x.to("cpu", copy=True)
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    host = _host_memory(x)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    # the allocator must not reuse x's memory before the side stream has read it
    x.record_stream(side)
    return host


def _host_memory(x: Tensor) -> Tensor:
    """Host memory for a copy of x as it lies in memory, gaps left out: pinned if there is any.

    Pinned memory can run out while the device and the host have plenty left: WSL2 limits it to one or two GB, and the
    error speaks of CUDA being out of memory. Copies from and to pageable memory are right, and slower.
    """
    try:
        return torch.empty_like(x, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _say_unpinned(str(error).splitlines()[0])
        return torch.empty_like(x, device="cpu")


@cache
def _say_unpinned(reason: str) -> None:
    _log.warning(
        "offload found no pinned host memory (%s); what does not fit goes to pageable memory, and copies of it do not "
        "overlap with the computation",
        reason,
    )


class _SideStream:
    """The way back to a CUDA device, on the stream of the copies to the host, so that it runs after them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, tensors: Tensors) -> tuple[Tensors, Any]:
        """The copies, and the event after which they are complete."""
        side = _side_stream(self.device)
        with torch.cuda.stream(side):
            copies = tuple(x.to(self.device, non_blocking=True) for x in tensors)
        return copies, side.record_event()

    def finish(self, arrival: tuple[Tensors, Any]) -> Tensors:
        copies, complete = arrival
        current = torch.cuda.current_stream(self.device)
        # wait for these copies alone, and not for those that were begun ahead
        current.wait_event(complete)
        for x in copies:
            x.record_stream(current)
        return copies
