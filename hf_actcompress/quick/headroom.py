"""The share of a card that is left free in answers to what fits on the card."""

from __future__ import annotations

from ..errors import UnknownOptionError

MOST_SHARE = 1.3
"""An estimate with so many times its bytes free is taken to fit whatever the allocator does.

In published fine-tuning runs it had reserved 1.11 to 1.28 times what was allocated.
"""

HEADROOM = 0.08
"""The share of a card that `plan` leaves free by default, and below which a fit without a replay is called tight.

An estimate counts tensors. CUDA's caching allocator reserves whole segments and cannot always put a new tensor into the
gaps of old ones. `estimate` replays a training's steps through its rules (`memory/estimation/reserved`), which says how
much that is; this share stands for it where no step is replayed: in the formula, in a plan, with several processes.
"""

ADVICE = (
    f"tight: less than {HEADROOM:.0%} of the card is left for fragmentation. "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces fragmentation"
)


def usable(budget: int, headroom: float) -> int:
    """Bytes of `budget` without the share that is left free.

    Raises:
        UnknownOptionError: The share is not in [0, 1).
    """
    if not 0 <= headroom < 1:
        raise UnknownOptionError(
            "headroom", str(headroom), ("a share of the card from 0 to less than 1",), refused=True
        )
    return int(budget * (1 - headroom))
