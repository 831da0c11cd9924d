"""Small codes packed into bytes: k bits per element, k from 1 to 8. Only the end of the last byte is unused.

k is split into fields of 4, 2 and 1 bits (3 = 2 + 1), each of which divides a byte. The fields follow one another in
the packed tensor. Within a byte the first element is in the lowest bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..compiling import is_compiling
from .device_rules import takes_constants

_FOUR_BITS: tuple[Any, Any] = (
    torch.tensor([15], dtype=torch.uint8, device="cpu"),
    torch.tensor([4], dtype=torch.uint8, device="cpu"),
)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """A 1-D uint8 tensor of `packed_bytes(codes.numel(), bits)` from codes: uint8 of any shape, each below 2**bits."""
    flat = codes.reshape(-1)
    if bits == 8:
        return flat.clone()
    parts = [_pack_field((flat >> shift) & (2**width - 1), width) for shift, width in _fields(bits)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` codes, uint8 [count], from what `pack_codes` returned."""
    if bits == 8:
        return packed
    codes, start = None, 0
    for shift, width in _fields(bits):
        size = -(-count * width // 8)
        field = _unpack_field(packed[start : start + size], width)[:count]
        codes = field if codes is None else codes | (field << shift)
        start += size
    assert codes is not None
    return codes


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """uint8 [R, `row_bytes(n, bits)`] from codes uint8 [R, n]. n is a multiple of 8 / bits, or of 8 if bits does not
    divide 8.

    Each row is packed by itself, so that rows can be selected or cut off.
    """
    if bits == 8:
        return codes
    if bits == 4:
        low, high = codes.view(codes.size(0), codes.size(1) // 2, 2).unbind(-1)
        return torch.add(low, high, alpha=16)
    parts = [_pack_field(((codes >> s) & (2**width - 1)).reshape(-1), width) for s, width in _fields(bits)]
    return torch.cat([part.view(codes.size(0), part.numel() // max(codes.size(0), 1)) for part in parts], 1)


def unpack_rows(packed: Tensor, bits: int) -> Tensor:
    """The codes [R, m 8 / bits] of what `pack_rows` returned [R, m]."""
    if bits == 8:
        return packed
    if bits == 4:
        # with tensors as operands a CPU takes half the time
        mask, shift = _FOUR_BITS if takes_constants(packed) else (15, 4)
        return torch.stack((packed & mask, packed >> shift), -1).flatten(1)
    rows, count = packed.size(0), packed.size(1) * 8 // bits
    codes, start = None, 0
    for shift, width in _fields(bits):
        size = count * width // 8
        field = _unpack_field(packed[:, start : start + size].reshape(-1), width).view(rows, count)
        codes = field if codes is None else codes | (field << shift)
        start += size
    assert codes is not None
    return codes


def row_bytes(features: int, bits: int) -> int:
    """Bytes of one row of codes: each row starts a new byte, and so does each field."""
    return bits * -(-features // 8) if len(_fields(bits)) > 1 else -(-features * bits // 8)


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes `count` codes of that many bits take."""
    return count if bits == 8 else sum(-(-count * width // 8) for _, width in _fields(bits))


def pack_mask(mask: Tensor) -> Tensor:
    """A bool tensor of any shape, 8 elements per byte."""
    # Inductor of torch 2.11 cannot read a bool tensor's memory as another dtype; a cast costs it nothing
    traced = is_compiling()
    return pack_codes(mask.to(torch.uint8) if traced else mask.view(torch.uint8), 1)


def unpack_mask(packed: Tensor, shape: torch.Size) -> Tensor:
    """The bool tensor of that shape that `pack_mask` packed."""
    bits = unpack_codes(packed, 1, shape.numel())
    return (bits.to(torch.bool) if is_compiling() else bits.view(torch.bool)).view(shape)


def _fields(bits: int) -> list[tuple[int, int]]:
    """(shift, width) of the fields of a code, lowest first."""
    fields, shift = [], 0
    for width in (4, 2, 1):
        if bits & width:
            fields.append((shift, width))
            shift += width
    return fields


def _pack_field(codes: Tensor, width: int) -> Tensor:
    per_byte = 8 // width
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % per_byte))
    rows = padded.view(padded.numel() // per_byte, per_byte)
    packed: Tensor = rows[:, 0]
    for i in range(1, per_byte):
        packed = packed | (rows[:, i] << (i * width))
    return packed


def _unpack_field(packed: Tensor, width: int) -> Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    codes: Tensor = (packed[:, None] >> shifts) & (2**width - 1)
    return codes.reshape(-1)
