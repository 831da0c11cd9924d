"""Functions of rows, computed a tile of rows at a time, so that their temporary tensors have the size of a tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from torch import Tensor

from ..compiling import is_compiling
from ..private_apis import FakeTensor

# elements of a tile: a larger tile does not use a device better. Smaller tensors are computed whole
TILE = 2**18


# tiles that are run for a fake tensor: all take the same memory, and sums over tiles exist from the second on
_FAKE_TILES = 2


def tiles(x: Tensor, tile: int) -> Iterator[slice]:
    """The rows of x [..., N, C], `tile` at a time; if x has no data, only the first tiles."""
    rows = x.shape[-2]
    parts = (slice(start, min(start + tile, rows)) for start in range(0, rows, tile))
    if isinstance(x, FakeTensor):
        return islice(parts, _FAKE_TILES)
    # on the meta device nobody counts memory
    return islice(parts, 1) if x.is_meta else parts


def goes_in_tiles(*tensors: Tensor) -> bool:
    """Whether `in_tiles` would use more than one tile for them."""
    if tensors[0].numel() <= TILE or is_compiling():
        return False
    return all(t.is_contiguous() for t in tensors)


def in_tiles(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> Sequence[Tensor]:
    """``function(*tensors)`` for a function that computes each row by itself, with the same bits.

    Args:
        function: Takes tensors [n, ...] and returns tensors [n, ...].
        tensors: [..., C], with equal dimensions except the last. Non-contiguous ones are passed as a whole, because
            their results have their own layout.

    The results own their memory: for a view, torch would not keep the tensor object that the registry knows.
    """
    x = tensors[0]
    if not goes_in_tiles(*tensors):
        return function(*tensors)
    rows = [t.view(-1, t.shape[-1]) for t in tensors]
    found: list[Tensor] = []
    for part in tiles(rows[0], max(1, TILE // x.shape[-1])):
        results = function(*(t[part] for t in rows))
        found = found or [y.new_empty((*x.shape[:-1], y.shape[-1])) for y in results]
        for y, result in zip(found, results, strict=True):
            y.view(-1, y.shape[-1])[part] = result
    return found
