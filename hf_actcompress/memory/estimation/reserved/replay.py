"""Steps of a training, replayed through the rules of CUDA's caching allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .caching_allocator import Block, CachingAllocator
from .repeated import Trace

# the first step makes the optimizer's states, and the second one runs beside them; a third one rarely adds anything
STEPS = 3


@dataclass(frozen=True)
class Held:
    """The tensors that a training allocates beside those of its steps, in bytes.

    Args:
        weights: Made before the first step.
        states: Made by the optimizer at the end of the first step, and kept.
        temporary: Made by the optimizer in each step, all at the same time.
    """

    weights: Sequence[int]
    states: Sequence[int] = ()
    temporary: Sequence[int] = ()


def reserved_share(held: Held, steps: Sequence[Trace], expandable: bool) -> float:
    """Bytes that the allocator reserves for each byte that is allocated, at the highest of each, with or without
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
    """
    allocator = CachingAllocator(expandable)
    replay(allocator, held, steps)
    return allocator.most_reserved / max(1, allocator.most_allocated)


def replay(allocator: CachingAllocator, held: Held, steps: Sequence[Trace]) -> None:
    """Allocate and free what a training does in some steps, each of which ends with the optimizer's step.

    A gradient lives from its place in the backward to the end of the step, where `zero_grad` frees it by default.
    """
    for size in held.weights:
        allocator.allocate(size)
    for number, step in enumerate(steps):
        before = allocator.most_reserved
        gradients = _run(allocator, step)
        if number == 0:
            for size in held.states:
                allocator.allocate(size)
        for block in [allocator.allocate(size) for size in held.temporary]:
            allocator.free(block)
        for block in gradients:
            allocator.free(block)
        if number and allocator.most_reserved == before and len({id(each) for each in steps}) == 1:
            # another step of the same kind would find the same blocks
            return


def _run(allocator: CachingAllocator, step: Trace) -> list[Block]:
    """Run forward and backward, free what they left, and return the gradients' blocks."""
    alive: dict[int, Block] = {}
    allocate, free, gradients = allocator.allocate, allocator.free, step.gradients
    for at, event in enumerate(step.events):
        if event > 0:
            alive[at] = allocate(event)
        elif event and -event - 1 not in gradients:
            free(alive.pop(-event - 1))
    found = [alive.pop(at) for at in sorted(gradients)]
    for block in alive.values():
        free(block)
    return found
