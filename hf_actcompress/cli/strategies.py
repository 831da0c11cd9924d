"""The strategies that a training can use: the rows of the table of `hf-actcompress estimate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..quick.headroom import HEADROOM, usable
from ..quick.strategies import STRATEGIES, StrategyRow

if TYPE_CHECKING:
    from ..config import CompressionConfig
    from ..memory.estimation.result import Estimate

# a search for the largest batch size ends here: a batch that fits at this size need not be known exactly
MOST = 1024


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Args:
        name: The name in the table.
        config: A preset, or None for the stock model.
        checkpointing: Whether gradient checkpointing is on.
        checkpoint_input: Codec of checkpointed layers' inputs, if it is not the preset's.
    """

    name: str
    config: str | None
    checkpointing: bool = False
    checkpoint_input: str | None = None

    @property
    def resolved(self) -> CompressionConfig | None:
        """The config that the model is patched with."""
        from ..config import CompressionConfig

        if self.config is None:
            return None
        other = {"checkpoint_input": self.checkpoint_input} if self.checkpoint_input is not None else {}
        return CompressionConfig.from_preset(self.config, **other)

    @property
    def known(self) -> StrategyRow:
        """The strategy as the page and the formula have it."""
        return StrategyRow(self.config, self.checkpointing, self.checkpoint_input, self.time, self.gradients)

    @property
    def patched_with(self) -> CompressionConfig | str | None:
        """The same config by its preset's name, if the preset is all of it."""
        return self.config if self.checkpoint_input is None else self.resolved

    @property
    def time(self) -> str:
        """A key of TIMES."""
        if self.checkpointing:
            return "forward"
        config = self.resolved
        if config is None:
            return "none"
        if config.always_in_tiles:
            return "mlp"
        codecs = config.codecs
        if any(name.startswith("offload") for name in codecs):
            return "transfer"
        return "low" if codecs == {"identity"} else "medium"

    @property
    def gradients(self) -> str:
        """Whether gradients are exact; if not, the fewest bits in which a codec stores an element."""
        config = self.resolved
        if config is None or config.lossless:
            return "exact"
        from ..codecs.table import CODECS

        bits = [bits for name in config.codecs if (bits := CODECS[name].bits) is not None]
        return f"lossy {min(bits)} bits" if bits else "lossy"


DEFAULT = tuple(Strategy(name, *how[:3]) for name, how in STRATEGIES.items())


def chosen(presets: Sequence[str]) -> tuple[Strategy, ...]:
    """All strategies of general use, or stock and the presets that were asked for. Raises UnknownOptionError."""
    if not presets:
        return DEFAULT
    from ..config import resolve

    others = [preset for preset in presets if preset != DEFAULT[0].name]
    for preset in others:
        resolve(preset)
    return (DEFAULT[0], *(Strategy(preset, preset) for preset in others))


@dataclass(frozen=True)
class Row:
    """The estimate of a strategy.

    Args:
        strategy: The strategy.
        estimate: Its estimate; None if the strategy cannot be used with this model.
        peaks: Batch size -> bytes that the card must have, for all sizes that were estimated.
        largest: The largest batch size for the card, 0 if none fits; None if it was not searched for.
        longest: The longest sequences for the card at that batch size; 0 and None as for `largest`.
        why_not: Why the strategy cannot be used.
    """

    strategy: Strategy
    estimate: Estimate | None
    peaks: dict[int, int] = field(default_factory=dict)
    largest: int | None = None
    longest: int | None = None
    why_not: str = ""

    def fits(self, room: int) -> bool:
        """Whether it fits on a card of `room` bytes."""
        return self.estimate is not None and self.estimate.device_bytes <= room

    def verdict(self, room: int) -> str:
        """ "no", "tight" or "yes"."""
        return "no" if not self.fits(room) else "tight" if self.tight(room) else "yes"

    def tight(self, room: int) -> bool:
        """Whether it fits, but not with what the allocator is expected to reserve, or to leave in gaps."""
        if self.estimate is None or not self.fits(room):
            return False
        share = self.estimate.reserved_share
        return not self.fits(usable(room, HEADROOM)) if share is None else self.estimate.reserved_bytes(share) > room
