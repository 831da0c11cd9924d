"""What a layer costs the host, counted in the same way for every mode: the slope between two depths of a model.

Tensors are tiny, so that a CPU's time is that of Python, autograd and the dispatcher. Bytes are counted with wider ones
(common/moved.py).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import moved
from .bench_models import Shape
from .traffic import Traffic

DEPTHS = (4, 12)
STEPS = 25
# hidden size of the models whose bytes are counted
WIDE = 512
# makes a model of these sizes, in train mode and prepared for its mode
Build = Callable[[Shape], Any]


@dataclass(frozen=True)
class Counts:
    """Figures of one layer, forward and backward; `moved` are bytes per token over the hidden size."""

    launches: float
    products: float
    attentions: float
    nodes: float
    moved_forward: float
    moved_backward: float


# field of `Counts` -> the column of a table
COUNTED = {
    "launches": "launches",
    "products": "products",
    "attentions": "attention calls",
    "nodes": "autograd nodes",
    "moved_forward": "bytes forward, h",
    "moved_backward": "bytes backward, h",
}


def small(layers: int, hidden: int) -> Shape:
    return Shape(hidden, layers, 2, 1, 2 * hidden, 200)


def host_microseconds(builds: Sequence[Build], hidden: int, rounds: int, autocast: bool = False) -> list[float]:
    """The time per layer in each mode; in every round of 25 steps all modes take turns, and minima count.

    The order of the modes changes in each step, because a mode is faster after one that has run the same code.
    """
    at = []
    shuffled = random.Random(0)
    for layers in DEPTHS:
        models = [build(small(layers, hidden)) for build in builds]
        best = [float("inf")] * len(models)
        for _ in range(rounds * STEPS):
            for i in shuffled.sample(range(len(models)), len(models)):
                best[i] = min(best[i], _seconds(models[i], autocast))
        at.append(best)
    return [1e6 * _per_layer(pair) for pair in zip(*at, strict=True)]


def counts(build: Build, family: str, hidden: int, autocast: bool = False) -> Counts:
    """The figures that do not depend on the machine."""
    found = []
    for layers in DEPTHS:
        model = build(small(layers, hidden))
        _loss(model, autocast).backward()
        with Traffic() as counter:
            _loss(model, autocast).backward()
        found.append((counter.launches, counter.products, counter.attentions, _nodes(_loss(model, autocast))))
    forward, backward, _ = moved.per_token(build, family, WIDE, autocast)
    slopes = [_per_layer(pair) for pair in zip(*found, strict=True)]
    return Counts(*slopes, sum(forward.values()), sum(backward.values()))


def _loss(model: Any, autocast: bool) -> torch.Tensor:
    ids = torch.randint(5, 190, (1, 4), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _seconds(model: Any, autocast: bool) -> float:
    """Process time of one step."""
    model.zero_grad()
    began = time.process_time()
    _loss(model, autocast).backward()
    return time.process_time() - began


def _per_layer(values: Sequence[float]) -> float:
    return (values[1] - values[0]) / (DEPTHS[1] - DEPTHS[0])


def _nodes(loss: torch.Tensor) -> int:
    """Number of nodes in the graph below a loss, without those that add to a parameter's gradient."""
    pending: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen and type(node).__name__ != "AccumulateGrad":
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions]
    return len(seen)
