"""The simulated allocator follows the documented rules of CUDA's caching allocator."""

from __future__ import annotations

import pytest

from hf_actcompress.memory.estimation.reserved.caching_allocator import CachingAllocator, OutOfMemory

MIB = 2**20


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (3 * MIB + 1, 3 * MIB + 512)])
def test_a_request_is_rounded_up_to_blocks(asked, given, expandable):
    allocator = CachingAllocator(expandable)
    assert allocator.allocate(asked).size == allocator.allocated == given


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_a_segment_has_the_size_of_its_class(asked, segment):
    allocator = CachingAllocator()
    allocator.allocate(asked)
    assert allocator.reserved == segment


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.allocate(512 * 1024)
    assert allocator.reserved == 2 * MIB
    allocator.allocate(512)
    assert allocator.reserved == 4 * MIB


def test_a_large_block_is_split_only_above_a_rest_of_1_mib():
    for rest, given in ((MIB, 21 * MIB), (MIB + 512, 20 * MIB - 512)):
        allocator = CachingAllocator()
        allocator.free(allocator.allocate(22 * MIB - MIB + MIB))
        taken = allocator.allocate(22 * MIB - rest)
        assert taken.size == (22 * MIB if rest == MIB else 22 * MIB - rest), given
        assert allocator.reserved == 22 * MIB


def test_a_small_block_is_split_from_512_bytes_on():
    allocator = CachingAllocator()
    assert allocator.allocate(MIB - 512).size == MIB - 512
    assert [allocator.allocate(size).size for size in (512, MIB)] == [512, MIB]
    assert allocator.reserved == 2 * MIB


def test_free_neighbours_are_merged():
    allocator = CachingAllocator()
    parts = [allocator.allocate(5 * MIB) for _ in range(4)]
    assert allocator.reserved == 20 * MIB
    for part in (parts[0], parts[2], parts[1]):
        allocator.free(part)
    allocator.allocate(15 * MIB)
    assert allocator.reserved == 20 * MIB
    # segments are never merged
    assert allocator.allocate(5 * MIB + 512).address != parts[3].address and allocator.reserved == 40 * MIB


def test_the_best_fit_is_taken_and_of_equal_ones_the_lowest_address():
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 24, 30, 24)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(23 * MIB) is blocks[1]
    assert allocator.allocate(24 * MIB) is blocks[3]
    assert allocator.allocate(25 * MIB).address == blocks[2].address


def fragmented(expandable: bool) -> CachingAllocator:
    """Sequences become longer, and the memory of each is freed before the next one is allocated."""
    allocator = CachingAllocator(expandable)
    for size in range(20, 60, 4):
        allocator.free(allocator.allocate(size * MIB))
    return allocator


def test_growing_sizes_fragment_but_not_in_segments_that_expand():
    assert fragmented(False).reserved == sum(range(20, 60, 4)) * MIB
    assert fragmented(True).reserved == 60 * MIB


def test_segments_without_a_tensor_are_given_back_when_the_device_is_full():
    allocator = CachingAllocator(limit=100 * MIB)
    kept = allocator.allocate(10 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    assert allocator.reserved == 70 * MIB
    allocator.allocate(80 * MIB)
    assert allocator.reserved == 90 * MIB and kept.size == 10 * MIB
    with pytest.raises(OutOfMemory):
        allocator.allocate(11 * MIB)


def test_a_segment_in_use_is_not_given_back():
    allocator = CachingAllocator(limit=60 * MIB)
    first, _ = allocator.allocate(20 * MIB), allocator.allocate(20 * MIB)
    allocator.free(first)
    allocator.allocate(10 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.allocate(30 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_segment_that_expands_grows_by_pages_at_its_end():
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(25 * MIB)
    assert allocator.reserved == 40 * MIB
    second = allocator.allocate(30 * MIB)
    assert second.address == first.address + first.size and allocator.reserved == 60 * MIB
    allocator.free(first)
    # a gap in the middle is reused, and what is too large for it goes to the end
    assert allocator.allocate(25 * MIB).address == first.address
    assert allocator.allocate(26 * MIB).address == second.address + second.size
    assert allocator.reserved == 100 * MIB
