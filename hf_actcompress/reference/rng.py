"""Random numbers for the codecs, from generators of their own.

They leave torch's default generators alone, so that dropout draws the masks of the stock model under every preset.
A checkpointed region that is computed again draws other numbers than before, which is as good: what the first pass
packed was dropped. Each process of a distributed run draws its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_generators: dict[torch.device, torch.Generator] = {}
_seed: int | None = None


def seed_codecs(seed: int | None = None) -> None:
    """Start all codec generators again, from `seed` or from torch's initial seed."""
    global _seed
    _seed = seed
    _generators.clear()


def _generator(device: torch.device) -> torch.Generator:
    if device not in _generators:
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        rank = torch.distributed.get_rank() if distributed else 0
        seed = torch.initial_seed() if _seed is None else _seed
        _generators[device] = torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63)
    return _generators[device]


def uniform(size: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1) from the codecs' generator of that device."""
    if torch.compiler.is_compiling():  # which knows no generator but the default one
        return torch.rand(size, dtype=dtype, device=device)
    return torch.rand(size, dtype=dtype, device=device, generator=_generator(device))


def kernel_seed(device: torch.device) -> Tensor:
    """An int64 [1] from the same generator, from which a kernel makes its own numbers. Stays on the device."""
    seed = torch.empty(1, dtype=torch.int64, device=device)
    return seed.random_() if torch.compiler.is_compiling() else seed.random_(generator=_generator(device))


@contextmanager
def codecs_undisturbed() -> Iterator[None]:
    """What is drawn inside leaves no trace in the codecs' generators."""
    before = {device: generator.get_state() for device, generator in _generators.items()}
    try:
        yield
    finally:
        for device in list(_generators):
            if device in before:
                _generators[device].set_state(before[device])
            else:
                del _generators[device]
