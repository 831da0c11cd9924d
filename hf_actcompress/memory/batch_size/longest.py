"""Batches of a data set's longest samples: if a batch of them fits, all others of that size fit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def longest_batches(
    dataset: Sequence[Any] | Any,
    collate: Callable[[list[Any]], Mapping[str, Any]],
    device: torch.device | str = "cpu",
    *,
    length: Callable[[Any], int] | str | None = None,
) -> Callable[[int], dict[str, Any]]:
    """A `make_batch` for `find_batch_size`: from a batch size, the batch of that many of the longest samples.

    A padded batch is as long as its longest sample, so no other batch of that size needs more memory. If you train one
    such batch first (`measure_step(lambda: step(make_batch(8)), device)`), a run does not fail for lack of memory hours
    later.

    Args:
        dataset: A sized collection of samples with `__getitem__`: a list, a torch or `datasets` data set.
        collate: The data collator of the training.
        device: Where the batches go.
        length: Length of a sample: a function, or the name of a column that has it. By default the length of
            `input_ids`.

    Returns:
        A function from a batch size to a batch on the device. A batch size beyond the data set takes samples again.

    Raises:
        ValueError: The data set is empty, or its samples have no `input_ids` and no `length` was given.
    """
    if not len(dataset):
        raise ValueError("longest_batches was given an empty data set")
    lengths = [_length(dataset[i], length) for i in range(len(dataset))]

    def make_batch(batch_size: int) -> dict[str, Any]:
        order = heapq.nlargest(batch_size, range(len(lengths)), key=lengths.__getitem__)
        samples = [dataset[order[i % len(order)]] for i in range(batch_size)]
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in collate(samples).items()}

    return make_batch


def _length(sample: Any, length: Callable[[Any], int] | str | None) -> int:
    if callable(length):
        return length(sample)
    name = length or "input_ids"
    if not isinstance(sample, Mapping) or name not in sample:
        raise ValueError(f"a sample has no {name!r}; pass `length`, a function of a sample or the name of a column")
    return int(sample[name]) if length else len(sample[name])
