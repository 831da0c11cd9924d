"""Graphs, breaks and recompilations of a compiled mode."""

from collections.abc import Callable

import torch
from torch._dynamo.utils import counters

# by how many tokens further batches are shorter, as from a data loader without fixed lengths
SHORTER = (8, 16, 24)


def graphs_and_breaks() -> tuple[int, int]:
    """The numbers of graphs and of breaks in this process so far."""
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def counted(step: Callable[[], object]) -> tuple[int, int]:
    """Graphs that a step makes, and the breaks between them."""
    before = graphs_and_breaks()
    step()
    after = graphs_and_breaks()
    return after[0] - before[0], after[1] - before[1]


def new_graphs(step: Callable[[dict[str, torch.Tensor]], object], batch: dict[str, torch.Tensor]) -> int:
    """How many graphs are made for batches of three other lengths, one after the other."""
    return sum(counted(lambda less=less: step(_shortened(batch, less)))[0] for less in SHORTER)  # type: ignore[misc]


def _shortened(batch: dict[str, torch.Tensor], less: int) -> dict[str, torch.Tensor]:
    return {name: x[:, :-less].contiguous() for name, x in batch.items()}
