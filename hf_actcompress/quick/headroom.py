"""The share of a card that stays free when it is asked what fits on the card."""

from __future__ import annotations

from ..errors import UnknownOptionError

HEADROOM = 0.08
"""The share of a card that `plan` leaves free by default, and below which a fit is called tight.

An estimate counts tensors. CUDA's caching allocator reserves whole segments and cannot always put a new tensor into the
gaps of old ones: in published fine-tuning runs it had reserved 1.11 to 1.28 times what was allocated. Segments that can
grow (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) take most of that away, and the share is for the rest.
"""

ADVICE = (
    f"tight: less than {HEADROOM:.0%} of the card are left for fragmentation. "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes that less"
)


def usable(budget: int, headroom: float) -> int:
    """Bytes of `budget` without the share that is left free.

    Raises:
        UnknownOptionError: The share is not in [0, 1).
    """
    if not 0 <= headroom < 1:
        raise UnknownOptionError("headroom", str(headroom), ("a share of the card from 0 to less than 1",))
    return int(budget * (1 - headroom))
