"""Packed codes: unpacking restores them for any number of bits and elements, and they take the stated bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actcompress.reference.bits import pack_codes, pack_mask, packed_bytes, unpack_codes, unpack_mask

SIZES = (0, 1, 3, 7, 8, 9, 31, 64, 65, 1001)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", SIZES)
def test_round_trip(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (count,), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.uint8 and packed.dim() == 1
    assert packed.numel() == packed_bytes(count, bits) < count * bits / 8 + 3
    assert torch.equal(unpack_codes(packed, bits, count), codes)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=70))
@settings(max_examples=60, deadline=None)
def test_any_codes(bits: int, values: list[int]) -> None:
    codes = torch.tensor([value % 2**bits for value in values], dtype=torch.uint8)
    assert torch.equal(unpack_codes(pack_codes(codes, bits), bits, len(values)), codes)


def test_first_element_is_in_the_lowest_bits() -> None:
    assert pack_codes(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.uint8), 1).tolist() == [1, 1]
    assert pack_codes(torch.tensor([1, 2], dtype=torch.uint8), 4).tolist() == [0x21]
    # three bits: the lower two of four elements, then the third of eight
    assert pack_codes(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), 3).tolist() == [0b00111001, 0b1000]


@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (3, 7), (2, 3, 5)])
def test_masks_of_any_shape(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.5
    packed = pack_mask(mask)
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack_mask(packed, mask.shape), mask)


def test_masks_in_any_order() -> None:
    mask = (torch.rand(6, 5) < 0.5).t()
    assert torch.equal(unpack_mask(pack_mask(mask), mask.shape), mask)


def test_packing_does_not_alias_or_write_its_input() -> None:
    for bits in (1, 4, 8):
        codes = torch.ones(16, dtype=torch.uint8)
        packed = pack_codes(codes, bits)
        packed.fill_(0)
        assert codes.eq(1).all()
