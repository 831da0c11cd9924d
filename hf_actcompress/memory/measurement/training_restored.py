"""Training steps after which weights, gradients, optimizer, buffers, modes and generators are restored."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ...records import storage_sizes
from .restore import draws_restored, forked_generators

_Undo = Callable[[], None]


@contextmanager
def training_restored(model: nn.Module, optimizer: Any = None) -> Iterator[Callable[[], None]]:
    """However the block trains the model, afterwards each tensor object is what it was before.

    What can change is copied to host memory: trainable parameters, buffers, gradients and the optimizer's states.

    Args:
        model: On its device, not on the meta device.
        optimizer: A torch optimizer, or one that shows its ``state`` and ``param_groups`` (accelerate's).

    Yields:
        A function that restores everything immediately, so that the block can start again from the same state.
    """
    trained = (p for p in model.parameters() if p.requires_grad)
    undo = [*map(_content, chain(trained, model.buffers())), *_gradients(model)]
    undo += [partial(setattr, module, "training", module.training) for module in model.modules()]
    if optimizer is not None:
        undo += _optimizer(optimizer)

    def restore() -> None:
        with torch.no_grad():
            for back in undo:
                back()

    with ExitStack() as stack:
        stack.enter_context(_generators(model))
        stack.callback(collect)
        stack.callback(restore)
        yield restore


def resident_bytes(model: nn.Module, optimizer: Any = None) -> int:
    """Bytes of the storages of parameters, buffers, gradients and the optimizer's states, each once.

    Only storages on the device of the model's first parameter count.
    """
    parameters = list(model.parameters())
    states = (
        [state for states in optimizer.state.values() for state in states.values()] if optimizer is not None else []
    )
    found = chain(parameters, model.buffers(), (p.grad for p in parameters), states)
    device = parameters[0].device
    return sum(storage_sizes(x for x in found if isinstance(x, Tensor) and x.device == device).values())


def _content(x: Tensor) -> _Undo:
    copied = x.detach().to("cpu", copy=True)

    def back() -> None:
        x.detach().copy_(copied)

    return back


def _gradients(model: nn.Module) -> list[_Undo]:
    parameters = list(model.parameters())
    objects = [partial(setattr, p, "grad", p.grad) for p in parameters]
    return [*objects, *(_content(p.grad) for p in parameters if p.grad is not None)]


def _optimizer(optimizer: Any) -> list[_Undo]:
    """Undo changes of the states: objects that existed before keep their identity, new ones are dropped."""
    states = {p: (state, dict(state)) for p, state in optimizer.state.items()}
    tensors = [x for _, values in states.values() for x in values.values() if isinstance(x, Tensor)]
    plain = [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

    def back() -> None:
        optimizer.state.clear()
        for p, (state, values) in states.items():
            state.clear()
            state.update(values)
            optimizer.state[p] = state
        for group, values in zip(optimizer.param_groups, plain, strict=True):
            group.update(copy.deepcopy(values))

    return [back, *map(_content, tensors)]


@contextmanager
def _generators(model: nn.Module) -> Iterator[None]:
    """Restore the random generators of torch, of the codecs, of Python, and of numpy if it is loaded."""
    numpy = sys.modules.get("numpy")
    plain, of_numpy = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with forked_generators(model), draws_restored(model):
            yield
    finally:
        random.setstate(plain)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def collect() -> None:
    """Free the garbage, and what CUDA's caching allocator holds without a tensor."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
