"""How x becomes a code in the few-bit kernels: numbers and tables that are computed once, on the host."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from ...reference.activation import activation_bwd
from .reference import TABLE, TWO_VALUED, UNBOUNDED, two_values, unpacked_codes
from .tables import GRIDS

# the most entries of a table, so that it stays in a multiprocessor's cache
_LARGEST = 4096


def encoding(kind: str, options: tuple[float, ...], bits: int, method: str) -> tuple[str, tuple[float, ...]]:
    """The arguments MODE and TABLE of the kernel that makes codes."""
    if kind in TWO_VALUED:
        return "two_valued", two_values(kind, options)
    if kind in UNBOUNDED:
        return "scaled", (2.0**bits - 1,)
    if method == "values" and bits == 8:
        zero, step = GRIDS[TABLE.get(kind, kind)]
        return "grid", (zero, 1 / step)
    low, scale, entries = _cells(kind, options, bits, method)
    return "cells", (low, scale, float(len(entries) - 1))


@cache
def cells(kind: str, options: tuple[float, ...], bits: int, method: str, device: torch.device) -> Tensor:
    """The table for MODE "cells", on a device."""
    return torch.tensor(_cells(kind, options, bits, method)[2], dtype=torch.int64, device=device)


@cache
def _cells(kind: str, options: tuple[float, ...], bits: int, method: str) -> tuple[float, float, tuple[int, ...]]:
    """Equal cells of the real line, each with at most one border between codes: (low, 1 / width, entries).

    x is in the cell (x - low) / width, or in the first or the last one. An entry's lower 32 bits are its border, or any
    number if it has none. Then come 8 bits for the code up to the border and 8 bits for the code above. A border's cell
    is computed in fp32 as the kernel computes that of x, so that rounding cannot move a border to another cell.
    """
    borders, codes = _borders(kind, options, bits, method)
    low, size, own = borders[0], 1, torch.zeros_like(borders)
    while len(own.unique()) < len(borders):
        size *= 2
        assert size <= _LARGEST, f"{kind}, {bits} bits by {method!r}: borders too near for a table"
        scale = (size - 1) / (borders[-1] - low)
        own = ((borders - low) * scale).clamp(0, size - 1).int()
    first = torch.searchsorted(own.int(), torch.arange(size, dtype=torch.int32, device="cpu"))
    last = torch.searchsorted(own.int(), torch.arange(size, dtype=torch.int32, device="cpu"), right=True)
    border = borders.view(torch.int32).long()[first.clamp(max=len(borders) - 1)] & 0xFFFFFFFF
    entries = border | codes[first] << 32 | codes[last] << 40
    return low.item(), scale.item() if size > 1 else 1.0, tuple(entries.tolist())


def _borders(kind: str, options: tuple[float, ...], bits: int, method: str) -> tuple[Tensor, Tensor]:
    """The last fp32 number before each change of the code [n], and the codes [n + 1] between these numbers.

    With them the kernel makes codes without computing f'. f' falls and rises, so a code may occur more than once.
    """
    near = torch.arange(-(2**15), 2**15 + 1, dtype=torch.float32, device="cpu") / 2**10
    far = near[-1] * 2 ** (torch.arange(1, 984, dtype=torch.float32, device="cpu") / 8)
    low, high, _ = known_slopes(kind, options)
    places = _order(torch.cat((near.new_tensor([low, high]), near, far, -far)).clamp(low, high)).unique()
    while True:
        codes = unpacked_codes(_at(places), kind, options, bits, method).long()
        change = codes[1:] != codes[:-1]
        before, after = places[:-1][change], places[1:][change]
        if bool((after - before <= 1).all()):
            return _at(before), torch.cat((codes[:1], codes[1:][change]))
        places = torch.cat((places[:1], before, (before + after) // 2, after)).unique()


def _order(x: Tensor) -> Tensor:
    """fp32 numbers as int64, such that neighbouring numbers differ by one."""
    bits = x.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _at(order: Tensor) -> Tensor:
    """The fp32 numbers whose `_order` this is."""
    return torch.where(order < 0, -order - 2**31, order).to(torch.int32).view(torch.float32)


@cache
def known_slopes(kind: str, options: tuple[float, ...]) -> tuple[float, float, bool]:
    """The least and the greatest number, -inf and inf included, whose f' is not NaN; and whether f' of NaN is NaN."""

    def lost(x: float) -> bool:
        at = torch.tensor([x], dtype=torch.float32, device="cpu")
        return bool(activation_bwd(torch.ones_like(at), at, kind, options).isnan())

    ends = []
    for sign in (-1, 1):
        # positive numbers are ordered like their bits, of which inf's are the largest
        known, end = 0, 0x7F800000
        while known < end:
            middle = (known + end + 1) // 2
            known, end = (known, middle - 1) if lost(_number(sign * middle)) else (middle, end)
        ends.append(_number(sign * known))
    return ends[0], ends[1], lost(math.nan)


def _number(order: int) -> float:
    return _at(torch.tensor([order], device="cpu")).item()
