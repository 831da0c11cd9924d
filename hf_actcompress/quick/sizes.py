"""Bytes as people write them."""

from __future__ import annotations

import re

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# sizes of tensors are numbers of 64 bits
_MOST = 2**63


def parse_size(size: int | str) -> int:
    """Bytes from bytes or from a text such as "22GiB", "24 GB" or "512MiB".

    Args:
        size: A number of bytes, or a number with its unit: GB are 10^9 bytes and GiB are 2^30.

    Raises:
        ValueError: No unit or an unknown one, nothing above 0, or more than any device has.
    """
    if isinstance(size, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]?i?b)\s*", size.lower())
        if found is None or found[2] not in _UNITS:
            raise ValueError(
                f"{size[:40]!r} is no size; give a number and one of B, KB, MB, GB, KiB, MiB, GiB, as in 22GiB"
            )
        nbytes = int(min(float(found[1]) * _UNITS[found[2]], _MOST))
    else:
        nbytes = int(size)
    if not 0 < nbytes < _MOST:
        raise ValueError(f"a size has to be above 0 bytes and below 2^63, got {str(size)[:40]}")
    return nbytes


def readable_size(nbytes: int) -> str:
    """Bytes for people."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
