"""Dropout whose mask is drawn again in backward, from the generator's state before the draw.

A state is a tensor on the host, and its dtype says what it holds: the whole state (uint8), or, for a CUDA device, seed
and offset (uint64 [2]), from which the device's kernels make all their numbers. The host knows both integers, so
nothing is copied from the device. In two cases the mask is kept instead: on a CPU, if it has fewer elements than the
generator's state has bytes (bool); and while a CUDA graph is captured, as bits (int8, on the device), because then only
the device knows the offset, and each replay of the graph has another one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import CaptureError
from .bits import pack_mask, unpack_mask
from .device_rules import device_rules, on_cpu

# held while a device's default generator is swapped
_lock = threading.RLock()

# in bytes: no kernel loads wider vectors, and the allocators align memory to at least this
_ALIGNMENT = 64

# bytes of a CPU's generator
_CPU_STATE = 5056

_OFFSET, _MASK = torch.uint64, torch.int8


def rng_state(device: torch.device) -> Tensor:
    """State of the default generator of `device`, on the host: 5,056 bytes for a CPU, 16 for a CUDA device.

    Raises:
        CaptureError: A CUDA graph is being captured, so the same numbers could not be drawn again.
    """
    rules = device_rules()
    if rules is not None:
        return rules.rng_state()
    if device.type == "cpu":
        return torch.get_rng_state()
    if device.type == "cuda":
        if _captured(device):
            raise CaptureError(
                "asked for the generator's state while a CUDA graph is captured: attention with dropout, and layers "
                "with dropout that run again in backward, cannot be captured; set their dropout to 0. Tiled MLPs ask "
                "for it also without dropout; set tiled_mlp=0"
            )
        return torch.tensor(_seed_and_offset(_generator(device)), dtype=_OFFSET)
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _generator(device: torch.device) -> torch.Generator:
    """The default generator of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _captured(device: torch.device) -> bool:
    """Whether kernels that are launched on the device now become part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _seed_and_offset(generator: torch.Generator) -> tuple[int, int]:
    return generator.initial_seed(), generator.get_offset()


def _set_seed_and_offset(generator: torch.Generator, seed: int, offset: int) -> None:
    if seed != generator.initial_seed():
        generator.manual_seed(seed)
    generator.set_offset(offset)


class StateBefore:
    """The state of a device's default generator before code that may draw from it."""

    def __init__(self, device: torch.device) -> None:
        rules = device_rules()
        self.device, self.state = device, rng_state(device)
        self._draws = rules.draws if rules is not None else 0

    def has_changed(self) -> bool:
        """Whether random numbers have been drawn since."""
        rules = device_rules()
        if rules is not None:
            return rules.draws != self._draws
        return not torch.equal(rng_state(self.device), self.state)


def draws_like_any(x: Tensor) -> bool:
    """Whether x gets the mask that any tensor of its size and dtype would get from the same state.

    A GPU's kernel draws for vectors of elements, and the alignment of x's address decides how wide these are.
    """
    return x.device.type == "cpu" or x.data_ptr() % _ALIGNMENT == 0


def dropout_fwd(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """torch's own ``dropout(x, p)``, and the state from which `dropout_replay` makes its mask again."""
    if _captured(x.device):
        y, mask = torch.native_dropout(x, p, True)
        return y, pack_mask(mask).view(_MASK)
    if x.numel() < _CPU_STATE and p < 1 and on_cpu(x):
        # what torch computes on a CPU
        noise = torch.empty_like(x).bernoulli_(1 - p)
        mask = noise.bool()
        return x * noise.div_(1 - p), mask
    state = rng_state(x.device)
    return functional.dropout(x, p, training=True), state


def dropout_replay(x: Tensor, state: Tensor, p: float) -> Tensor:
    """`dropout(x, p)` with the mask that `state` gives; afterwards the default generator is as before.

    Applied to dy it is the gradient: both are x * mask / (1 - p), and the stock kernels compute both by this formula.
    """
    x = x.contiguous()
    if state.dtype == torch.bool:
        return x * state.to(x.dtype).div_(1 - p)
    if state.dtype == _MASK:
        mask = unpack_mask(state.view(torch.uint8), x.shape)
        return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p) if p < 1 else 0.0)  # type: ignore[no-any-return]
    if state.dtype != _OFFSET and x.device.type == "cpu":
        generator = torch.Generator().set_state(state)
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=generator)
        return x * noise.div_(1 - p) if p < 1 else x * noise
    x = x if draws_like_any(x) else x.clone()
    with replayed_rng(state, x.device):
        return functional.dropout(x, p, training=True)


@contextmanager
def replayed_rng(state: Tensor, device: torch.device) -> Iterator[None]:
    """While the block runs, `device`'s default generator is set to `state`; afterwards it is as before."""
    rules = device_rules()
    if rules is not None:
        # tensors without data need no numbers, so the process's generator is left alone; its state is only counted
        _current = rules.rng_state()
        yield
        return
    with _lock:
        if state.dtype == _OFFSET:
            generator = _generator(device)
            restore = partial(_set_seed_and_offset, generator, *_seed_and_offset(generator))
            _set_seed_and_offset(generator, *state.tolist())
        else:
            module = torch if device.type == "cpu" else torch.get_device_module(device)
            where = () if device.type == "cpu" else (device,)
            restore = partial(module.set_rng_state, module.get_rng_state(*where), *where)
            module.set_rng_state(state, *where)
        try:
            yield
        finally:
            restore()
