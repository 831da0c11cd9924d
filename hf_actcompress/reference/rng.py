"""Random numbers for the codecs, from generators of their own: each patched model has its own.

They leave torch's default generators alone, so that dropout draws the masks of the stock model under every preset.
A checkpointed region that is computed again draws other numbers than before, which is as good: what the first pass
packed was dropped. Each process of a distributed run draws its own.

A codec of a patched model carries the model's `Generators` and hands them to `drawn_from`, so that they are found
wherever it packs: in a forward, in an inner model's forward, in the second pass of a checkpoint, in another thread. A
codec that belongs to no model draws from those of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class Generators:
    """One generator per device, each made when it is first needed.

    A copy (`copy.deepcopy`, pickle) starts where the original is at that moment: it draws the same numbers next, and
    from then on neither changes what the other draws.

    Args:
        seed: What they start from; None: torch's initial seed at the first draw.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        # what a codec that remembers samples has to know: numbers [B], on the host, that tell the sequences apart with
        # which the model was called last. Here because a checkpoint's recomputation looks for them in any thread
        self.samples: Tensor | None = None
        # what codecs have learnt in training at the place where they are used, by that place's name; of this a copy has
        # all but the tensors, which are of a device
        self.learnt: dict[str, Any] = {}
        self._of: dict[torch.device, torch.Generator] = {}

    def restart(self, seed: int | None) -> None:
        """Start again from `seed`."""
        self.seed = seed
        self._of.clear()

    def on(self, device: torch.device) -> torch.Generator:
        """The generator of a device. It depends on the rank of the process, so that each draws its own."""
        if device not in self._of:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if distributed else 0
            seed = torch.initial_seed() if self.seed is None else self.seed
            self._of[device] = torch.Generator(device).manual_seed((seed + 0x9E3779B97F4A7C15 * (rank + 1)) % 2**63)
        return self._of[device]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Draws in the block do not change the generators."""
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
        # as states on the host: a file is read on machines that have not these devices
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


# of what belongs to no model
_process = Generators()
_current: ContextVar[Generators | None] = ContextVar("hf_actcompress_generators", default=None)


def seed_codecs(seed: int | None = None) -> None:
    """Start the generators of the process again, from `seed` or from torch's initial seed. No model's are touched."""
    _process.restart(seed)


def drawn_from(generators: Generators | None, function: Callable[..., _Result], *args: Any) -> _Result:
    """``function(*args)``, whose random numbers come from `generators`; None: from whichever hold already."""
    # a compiler knows no generator but the default one
    if generators is None or torch.compiler.is_compiling():
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
    if torch.compiler.is_compiling():  # which knows no generator but the default one
        return torch.rand(size, dtype=dtype, device=device)
    return torch.rand(size, dtype=dtype, device=device, generator=_generator(device))


def kernel_seed(device: torch.device) -> Tensor:
    """An int64 [1] from the same generator, from which a kernel makes its own numbers. Stays on the device."""
    seed = torch.empty(1, dtype=torch.int64, device=device)
    return seed.random_() if torch.compiler.is_compiling() else seed.random_(generator=_generator(device))


@contextmanager
def codecs_undisturbed() -> Iterator[None]:
    """What is drawn inside leaves no trace in the generators that hold now."""
    with (_current.get() or _process).undisturbed():
        yield
