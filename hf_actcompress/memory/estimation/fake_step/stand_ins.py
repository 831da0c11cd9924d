"""What a step on fake tensors uses in place of the real functions. Nothing global is replaced for it, so that other
threads are not disturbed.

Our own functions get `StepRules` through a context variable. What torch and transformers call is handled by modes of
this thread (`masks.py`), and by changes to the copy of the model that the step runs on (`counted_checkpoints`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ....models.checkpointing import checkpoint_without_cache
from ....reference.table import FUNCTIONS
from .fake_allocator import FakeAllocator
from .fake_kernels import KernelResults, Kernels

_CHECKPOINT = "_gradient_checkpointing_func"


class StepRules:
    """The rules of the device for which the estimate is made: a CPU, or a CUDA device, for which `kernels` are the
    known results of its kernels. New ones are added.
    """

    def __init__(self, allocator: FakeAllocator, kernels: KernelResults | None) -> None:
        self._allocator = allocator
        self._kernels = None if kernels is None else Kernels(allocator, kernels)

    @property
    def on_cpu(self) -> bool:
        return self._kernels is None

    def function(self, name: str) -> Callable[..., Any]:
        return FUNCTIONS[name] if self._kernels is None else self._kernels.function(name)

    def turns(self, starts: range) -> Sequence[int]:
        """The turns of a loop to run: the first two and the last. Those between hold no more than the second.

        Inside a kernel it is one turn: the loop's results exist before it, and nothing else is counted.
        """
        if self._allocator.is_muted:
            return starts[:1]
        return starts if len(starts) <= 3 else (*starts[:2], starts[-1])

    def parts(self, every: list[slice]) -> Iterator[slice]:
        """Likewise for parts whose results are joined: those between are run as one part that is not counted."""
        if len(every) <= 4:
            yield from every
            return
        if self._allocator.is_muted:
            yield every[0]
            yield slice(every[1].start, every[-1].stop)
            return
        yield from every[:2]
        with self._allocator.elsewhere():
            yield slice(every[2].start, every[-2].stop)
        yield every[-1]

    def rng_state(self) -> Tensor:
        """A real tensor with the generator's state. It is counted for a CPU; for a CUDA device it is in host memory."""
        state = torch.get_rng_state()
        self._allocator.count(state, None if self.on_cpu else 0)
        return state

    @property
    def draws(self) -> int:
        return self._allocator.draws

    def to_host(self, x: Tensor) -> Tensor:
        with nullcontext() if self.on_cpu else self._allocator.elsewhere():
            return x.clone()

    def to_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tensors if self.on_cpu else tuple(x.clone() for x in tensors)


def counted_checkpoints(model: nn.Module, *, cuda: bool) -> None:
    """Let the layers of the estimate's own copy of a model be checkpointed without the generator of the process.

    torch's checkpoint sets the default generator for the second pass, and a training in another thread would draw from
    it then. A step on fake tensors draws nothing. The state that is kept per layer is counted all the same.
    """
    for module in model.modules():
        stock = module.__dict__.get(_CHECKPOINT)
        if stock is not None:
            module.__dict__[_CHECKPOINT] = _Checkpoint(stock, cuda)


def checkpoint_block(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The checkpoint function of diffusers, where it can be looked at."""
    return checkpoint(block, *args, use_reentrant=False, **kwargs)


class _Checkpoint:
    """The checkpoint function of a layer, which keeps a stand-in for the generator's state.

    Attributes:
        stands_for: The function of a real step.
    """

    def __init__(self, stock: Callable[..., Any], cuda: bool) -> None:
        self.stands_for, self._cuda = stock, cuda

    def __call__(self, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        preset = self.stands_for.keywords if isinstance(self.stands_for, functools.partial) else {}
        function = self.stands_for.func if isinstance(self.stands_for, functools.partial) else self.stands_for
        if function not in (checkpoint, checkpoint_without_cache, checkpoint_block) or not {**preset, **kwargs}.pop(
            "preserve_rng_state", True
        ):
            return self.stands_for(layer, *args, **kwargs)
        # a CPU's state is a fake tensor, so that it is counted; a CUDA device's state is kept on the host
        state = None if self._cuda else torch.empty(_state_bytes(), dtype=torch.uint8)
        return self.stands_for(_Held(layer, state), *args, **{**kwargs, "preserve_rng_state": False})


class _Held:
    """A layer, and a state that lives as long as the layer's checkpoint."""

    def __init__(self, layer: Callable[..., Any], state: Tensor | None) -> None:
        self._layer, self._state = layer, state
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # while the layer is recomputed, torch's checkpoint holds two states: that of the forward, and the current
        # one
        now = torch.empty_like(self._state) if self._called and self._state is not None else None
        self._called = True
        try:
            return self._layer(*args, **kwargs)
        finally:
            del now


@functools.cache
def _state_bytes() -> int:
    return torch.get_rng_state().numel()
