"""Dropout whose mask is drawn again in backward from the generator's state before the draw."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from .device_rules import device_rules

# one swap of a device's default generator at a time
_lock = threading.RLock()

# bytes: of the widest vector that a kernel loads, and more; what the allocators return is aligned to this at least
_ALIGNMENT = 64


def rng_state(device: torch.device) -> Tensor:
    """State of the default generator of `device`: a uint8 tensor on the host (5,056 bytes CPU, 16 bytes CUDA)."""
    rules = device_rules()
    if rules is not None:
        return rules.rng_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


class StateBefore:
    """The state of the default generator of a device, for what begins now and may draw from it."""

    def __init__(self, device: torch.device) -> None:
        rules = device_rules()
        self.device, self.state = device, rng_state(device)
        self._draws = rules.draws if rules is not None else 0

    def has_changed(self) -> bool:
        """Whether something has been drawn since."""
        rules = device_rules()
        if rules is not None:
            return rules.draws != self._draws
        return not torch.equal(rng_state(self.device), self.state)


def draws_like_any(x: Tensor) -> bool:
    """Whether x gets the mask that every tensor of its size and dtype gets from the same state.

    On a device the kernel draws for vectors of elements, as wide as the address allows.
    """
    return x.device.type == "cpu" or x.data_ptr() % _ALIGNMENT == 0


def dropout_replay(x: Tensor, state: Tensor, p: float) -> Tensor:
    """`dropout(x, p)` with the mask that was drawn from `state`; the default generator is left as found.

    On dy it is the gradient: both are x * mask / (1 - p), and the stock kernels compute both by this formula.
    """
    x = x.contiguous()
    if x.device.type == "cpu":
        generator = torch.Generator().set_state(state)
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
        return x * noise.div_(1 - p) if p < 1 else x * noise
    x = x if draws_like_any(x) else x.clone()
    with replayed_rng(state, x.device):
        return functional.dropout(x, p, training=True)


@contextmanager
def replayed_rng(state: Tensor, device: torch.device) -> Iterator[None]:
    """Run a block with `device`'s default generator set to `state`, then put it back as it was."""
    rules = device_rules()
    if rules is not None:
        # nothing is drawn for tensors without data: the generator of the process is left alone
        current = rules.rng_state()
        yield
        return
    with _lock:
        module = torch if device.type == "cpu" else torch.get_device_module(device)
        where = () if device.type == "cpu" else (device,)
        current = module.get_rng_state(*where)
        module.set_rng_state(state, *where)
        try:
            yield
        finally:
            module.set_rng_state(current, *where)
