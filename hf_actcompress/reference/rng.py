"""Random numbers for the codecs, from separate generators; each patched model has its own.

torch's default generators are left alone, so that dropout draws the stock model's masks under every preset. A
checkpointed region draws other numbers when it is recomputed. That is as good, because what the first pass packed
was dropped. Each process of a distributed run draws its own numbers.

A codec of a patched model carries the model's `Generators` and passes them to `drawn_from`. So they are found wherever
the codec packs: in a forward, in an inner model's forward, in a checkpoint's second pass, in another thread. A codec
that belongs to no model uses the generators of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..compiling import is_compiling

_Result = TypeVar("_Result")


class Generators:
    """One generator per device, each made when it is first needed.

    A copy (`copy.deepcopy`, pickle) starts in the original's state at that moment: it draws the same numbers next.
    After that neither changes what the other draws.

    Args:
        seed: The seed of the generators; None: torch's initial seed at the first draw.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        # for codecs that remember samples: numbers [B], on the host, which identify the sequences of the model's latest
        # call. They are stored here because a checkpoint's second pass looks for them in any thread
        self.samples: Tensor | None = None
        # name of a place where codecs are used -> what they have learnt there in training. A copy gets all of it except
        # tensors, which belong to a device
        self.learnt: dict[str, Any] = {}
        self._of: dict[torch.device, torch.Generator] = {}

    def restart(self, seed: int | None) -> None:
        """Start all generators again, from `seed`."""
        self.seed = seed
        self._of.clear()

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device. Its seed depends on the rank, so that each process has its own numbers."""
        if device not in self._of:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if distributed else 0
            seed = torch.initial_seed() if self.seed is None else self.seed
            self._of[device] = torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63)
        return self._of[device]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Draws in the block do not change these generators."""
        seed, before = self.seed, {device: generator.get_state() for device, generator in self._of.items()}
        try:
            yield
        finally:
            self.seed = seed
            for device in list(self._of):
                if device in before:
                    self._of[device].set_state(before[device])
                else:
                    del self._of[device]

    def __getstate__(self) -> dict[str, Any]:
        # states on the host, because a file may be read on a machine that does not have these devices
        learnt = {place: known for place, known in self.learnt.items() if not isinstance(known, Tensor)}
        return {"seed": self.seed, "states": {str(d): g.get_state() for d, g in self._of.items()}, "learnt": learnt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["seed"])  # type: ignore[misc]
        self.learnt = state.get("learnt", {})
        for name, known in state["states"].items():
            device = torch.device(name)
            if device.type == "cpu" or torch.get_device_module(device).is_available():
                self._of[device] = torch.Generator(device)
                self._of[device].set_state(known)


# for codecs that belong to no model
_process = Generators()
_current: ContextVar[Generators | None] = ContextVar("hf_actcompress_generators", default=None)


def seed_codecs(seed: int | None = None) -> None:
    """Restart the process's generators, from `seed` or from torch's initial seed. Models' generators do not change."""
    _process.restart(seed)


def drawn_from(generators: Generators | None, function: Callable[..., _Result], *args: Any) -> _Result:
    """``function(*args)`` with random numbers from `generators`; None: from those that are in use already."""
    # compiled code can only use the default generator
    if generators is None or is_compiling():
        return function(*args)
    token = _current.set(generators)
    try:
        return function(*args)
    finally:
        _current.reset(token)


def _generator(device: torch.device) -> torch.Generator:
    return (_current.get() or _process).on(device)


def uniform(size: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers in [0, 1) from the codecs' generator of that device."""
    if is_compiling():  # compiled code can only use the default generator
        return torch.rand(size, dtype=dtype, device=device)
    return torch.rand(size, dtype=dtype, device=device, generator=_generator(device))


def kernel_seed(device: torch.device) -> Tensor:
    """A seed int64 [1] from the same generator, with which a kernel makes its own numbers. It stays on the device."""
    seed = torch.empty(1, dtype=torch.int64, device=device)
    return seed.random_() if is_compiling() else seed.random_(generator=_generator(device))


@contextmanager
def codecs_undisturbed() -> Iterator[None]:
    """Draws in the block do not change the generators that are in use."""
    with (_current.get() or _process).undisturbed():
        yield
