"""Host memory: what another codec packs, moved off the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .codec import Codec
from .identity import Identity


@dataclass(frozen=True)
class OffloadedMeta:
    """The static half: the inner codec's, and where its tensors come from."""

    inner: object
    device: torch.device


@dataclass(frozen=True)
class Offload(Codec):
    """Pack with another codec, then keep the bytes in host memory.

    From a CUDA device the copy goes to pinned memory on a side stream while the forward runs on, and comes back on the
    same stream; the backward waits for it there and not on the host. Elsewhere it is a plain copy. With the
    identity inside, x must not be written in place before the copy is through, which nothing checks; other codecs
    have made their own tensors.

    Bytes: none on the device; in host memory those of the inner codec.
    Bias: the inner codec's.

    Args:
        inner: How the bytes are encoded before they are moved; its `linear_only` counts.
    """

    inner: Codec = field(default_factory=Identity)

    @property
    def linear_only(self) -> bool:
        return self.inner.linear_only

    @property
    def for_images(self) -> bool:
        return self.inner.for_images

    @property
    def lossless(self) -> bool:
        return self.inner.lossless

    def pack(self, x: Tensor) -> tuple[tuple[Tensor, ...], object]:
        tensors, meta = self.inner.pack(x)
        return tuple(_to_host(t.detach()) for t in tensors), OffloadedMeta(meta, x.device)

    def unpack(self, tensors: tuple[Tensor, ...], meta: object) -> Tensor:
        assert isinstance(meta, OffloadedMeta)
        return self.inner.unpack(_to_device(tensors, meta.device), meta.inner)

    def grad_weight(self, dy: Tensor, tensors: tuple[Tensor, ...], meta: object) -> Tensor | None:
        assert isinstance(meta, OffloadedMeta)
        return self.inner.grad_weight(dy, _to_device(tensors, meta.device), meta.inner)

    def nbytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        return self.inner.nbytes(shape, dtype)


@cache
def _side_stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _to_host(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.to("cpu", copy=True)
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    # pinned memory as x lies in memory, gaps left out
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(x, non_blocking=True)
    # x's memory is not given to others before the side stream has read it
    x.record_stream(side)
    return host


def _to_device(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
    if device.type != "cuda":
        return tuple(x.to(device) for x in tensors)
    side, current = _side_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(side):
        # on the stream that brought them to the host, so behind that copy
        back = tuple(x.to(device, non_blocking=True) for x in tensors)
    current.wait_stream(side)
    for x in back:
        x.record_stream(current)
    return back
