"""The rules of PyTorch's CUDA caching allocator, on numbers alone.

Sources: "Memory management" in PyTorch's "CUDA semantics", the comment at the head of c10/cuda/CUDACachingAllocator.cpp
and its functions `get_allocation_size` and `should_split`, and the constants of c10/core/AllocatorConfig.h.

| rule | value |
|---|---|
| a request is rounded up to a multiple of | 512 bytes |
| it goes to the small pool up to | 1 MiB |
| a new segment of the small pool has | 2 MiB |
| one for a request below 10 MiB | 20 MiB |
| one for a larger request | the request, rounded up to 2 MiB |
| the block that is taken | the smallest that is large enough, and of equal ones that with the lowest address |
| the rest of it is split off | from 512 bytes on in the small pool; above 1 MiB in the large one |
| a freed block | is merged with free neighbours in its segment, and its segment stays reserved |
| a request that the device cannot serve | all segments without a tensor are given back, and it is tried again |

With `expandable_segments:True` each pool has one segment, which grows at its end by pages of 2 MiB (small) or 20 MiB
(large), and in both pools the rest is split off from 512 bytes on. When the device is full, the real allocator may
give back pages in the middle of a segment; this one never does. One stream is assumed.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import count

_BLOCK, _MIB = 512, 2**20
_SMALL, _SMALL_SEGMENT = _MIB, 2 * _MIB
_MIDDLE, _MIDDLE_SEGMENT, _LARGE_ROUND = 10 * _MIB, 20 * _MIB, 2 * _MIB
# segments have addresses so far from each other that no two of them touch
_APART = 2**50


class OutOfMemory(Exception):
    """The device does not have as many bytes as were asked for."""


class Block:
    """A piece of a segment. Blocks of one segment form a list by address."""

    __slots__ = ("address", "following", "free", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: _Pool, previous: Block | None, following: Block | None) -> None:
        self.address, self.size, self.pool, self.free = address, size, pool, False
        self.previous, self.following = previous, following


class _Pool:
    """The free blocks by size and address, and the smallest rest that is split off a block."""

    def __init__(self, small: bool, expandable: bool) -> None:
        self.least_rest = _BLOCK if small or expandable else _SMALL + 1
        self.page = _SMALL_SEGMENT if small else _MIDDLE_SEGMENT
        self.free: list[tuple[int, int, Block]] = []
        # the last block of the segment that grows
        self.end: Block | None = None

    def add(self, block: Block) -> None:
        block.free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        block.free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """Allocates and frees blocks, which have an address and a size, and no memory.

    Args:
        expandable: Whether `expandable_segments` is on.
        limit: Bytes of the device; None: no limit.

    Attributes:
        allocated, reserved: Bytes of the blocks in use, and of all segments; what `torch.cuda.memory_allocated` and
            `memory_reserved` show.
        most_allocated, most_reserved: The highest of each so far.
    """

    def __init__(self, expandable: bool = False, limit: int | None = None) -> None:
        self.expandable, self.limit = expandable, limit
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._small, self._large = _Pool(True, expandable), _Pool(False, expandable)
        self._addresses = count(0, _APART)

    def allocate(self, nbytes: int) -> Block:
        """A block of at least so many bytes.

        Raises:
            OutOfMemory: The device does not have as many.
        """
        size = -(-max(nbytes, 1) // _BLOCK) * _BLOCK
        pool = self._small if size <= _SMALL else self._large
        at = bisect_left(pool.free, (size,))
        if at < len(pool.free):
            block = pool.free.pop(at)[2]
            block.free = False
        else:
            block = self._expanded(pool, size) if self.expandable else self._segment(pool, size)
        if block.size - size >= pool.least_rest:
            self._split(block, size)
        self.allocated += block.size
        if self.allocated > self.most_allocated:
            self.most_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool."""
        pool, before, after = block.pool, block.previous, block.following
        self.allocated -= block.size
        if after is not None and after.free:
            pool.remove(after)
            self._join(block, after)
        if before is not None and before.free:
            pool.remove(before)
            self._join(before, block)
            block = before
        pool.add(block)

    def release(self) -> None:
        """Give all segments without a tensor back to the device, as `torch.cuda.empty_cache` does."""
        for pool in (self._small, self._large):
            for _, _, block in list(pool.free):
                if block.previous is None and block.following is None and not self.expandable:
                    pool.remove(block)
                    self.reserved -= block.size

    def _segment(self, pool: _Pool, size: int) -> Block:
        whole = _segment_size(size)
        self._reserve(whole)
        return Block(next(self._addresses), whole, pool, None, None)

    def _expanded(self, pool: _Pool, size: int) -> Block:
        """A block at the end of the pool's segment, which grows by whole pages."""
        end = pool.end
        there = end.size if end is not None and end.free else 0
        missing = -(-(size - there) // pool.page) * pool.page
        self._reserve(missing)
        if end is not None and end.free:
            pool.remove(end)
            end.size += missing
            return end
        address = next(self._addresses) if end is None else end.address + end.size
        block = Block(address, missing, pool, end, None)
        if end is not None:
            end.following = block
        pool.end = block
        return block

    def _reserve(self, nbytes: int) -> None:
        if self.limit is not None and self.reserved + nbytes > self.limit:
            self.release()
            if self.reserved + nbytes > self.limit:
                raise OutOfMemory(f"{nbytes} bytes more than {self.reserved} of {self.limit}")
        self.reserved += nbytes
        self.most_reserved = max(self.most_reserved, self.reserved)

    @staticmethod
    def _split(block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.pool, block, block.following)
        if rest.following is not None:
            rest.following.previous = rest
        if block.pool.end is block:
            block.pool.end = rest
        block.size, block.following = size, rest
        block.pool.add(rest)

    @staticmethod
    def _join(first: Block, second: Block) -> None:
        first.size += second.size
        first.following = second.following
        if first.following is not None:
            first.following.previous = first
        if first.pool.end is second:
            first.pool.end = first


def _segment_size(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _LARGE_ROUND) * _LARGE_ROUND
