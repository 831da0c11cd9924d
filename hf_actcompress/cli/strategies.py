"""What a training can be run with: the rows of the table of `hf-actcompress estimate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..config import CompressionConfig
    from ..memory.estimate import Estimate, Estimates

TIME_CLASSES = {
    "none": "as stock",
    "low": "rebuilds what is cheap to rebuild, in backward",
    "medium": "rebuilds what is cheap, and packs and unpacks what is kept",
    "transfer": "as fast as the link to host memory lets it be",
    "forward": "one more forward: a third more arithmetic",
}

# no search for the largest batch size goes beyond it: what fits so often fits
MOST = 1024
# that a search for the largest batch size may take
_ESTIMATES = 8


@dataclass(frozen=True)
class Strategy:
    """One way to train.

    Args:
        name: As shown.
        config: A preset, or None for the stock model.
        checkpointing: With gradient checkpointing.
        checkpoint_input: Codec of the layers' inputs there, if it is not the preset's.
    """

    name: str
    config: str | None
    checkpointing: bool = False
    checkpoint_input: str | None = None

    @property
    def resolved(self) -> CompressionConfig | None:
        """What the model is patched with."""
        from ..config import CompressionConfig

        if self.config is None:
            return None
        other = {"checkpoint_input": self.checkpoint_input} if self.checkpoint_input is not None else {}
        return CompressionConfig.from_preset(self.config, **other)

    @property
    def time(self) -> str:
        """One of TIME_CLASSES."""
        if self.checkpointing:
            return "forward"
        config = self.resolved
        if config is None:
            return "none"
        codecs = _codecs(config)
        if any(name.startswith("offload") for name in codecs):
            return "transfer"
        return "low" if codecs == {"identity"} else "medium"

    @property
    def gradients(self) -> str:
        """ "exact", or what is lost."""
        config = self.resolved
        if config is None or config.lossless:
            return "exact"
        bits = [bits for name in _codecs(config) if (bits := _bits(name)) is not None]
        return f"lossy: {min(bits)} bits" if bits else "lossy"


DEFAULT = (
    Strategy("stock", None),
    Strategy("checkpointing", None, checkpointing=True),
    Strategy("exact", "exact"),
    Strategy("exact + checkpointing", "exact", checkpointing=True),
    Strategy("exact + compressed checkpoint", "exact", checkpointing=True, checkpoint_input="int8_outliers"),
    Strategy("int8", "int8"),
    Strategy("int4", "int4"),
    Strategy("offload", "offload"),
)


def chosen(presets: list[str]) -> tuple[Strategy, ...]:
    """All that are of general use, or stock and the presets that were asked for. Raises UnknownOptionError."""
    if not presets:
        return DEFAULT
    from ..config import resolve

    for preset in presets:
        resolve(preset)
    return (DEFAULT[0], *(Strategy(preset, preset) for preset in presets))


def _codecs(config: CompressionConfig) -> set[str]:
    from ..config import CODEC_ROLES

    return {*(getattr(config, role) for role in CODEC_ROLES), *(codec for _, _, codec in config.overrides)}


def _bits(codec: str) -> int | None:
    """Of an element, where the codec rounds all of them."""
    from ..codecs import CODECS, Float8, IntGroup, Offload

    found = CODECS[codec]
    inner = found.inner if isinstance(found, Offload) else found
    if isinstance(inner, IntGroup):
        return inner.bits
    return 8 if isinstance(inner, Float8) else None


@dataclass(frozen=True)
class Row:
    """A strategy's estimate.

    Args:
        strategy: What was estimated.
        estimate: None if it cannot be used with this model.
        peaks: Batch size -> bytes that the card has to have, of all that were estimated.
        largest: The largest batch size for the card, 0 if none fits; None if it was not looked for.
        why_not: Why it cannot be used.
    """

    strategy: Strategy
    estimate: Estimate | None
    peaks: dict[int, int] = field(default_factory=dict)
    largest: int | None = None
    why_not: str = ""

    def fits(self, room: int) -> bool:
        """On a card of so many bytes."""
        return self.estimate is not None and self.estimate.device_bytes <= room


def rows(model: Any, strategies: tuple[Strategy, ...], room: int | None, **options: Any) -> Iterator[Row]:
    """The estimates, one after the other: each takes seconds.

    Args:
        model: What `estimate` takes.
        strategies: The first one has to be possible; another that is not gets a row that says why.
        room: Bytes of the card, for which the largest batch sizes are looked for; None if there is none.
        options: Of `estimate`.
    """
    from ..errors import ActCompressError
    from ..memory.estimate import Estimates

    sizes = options.pop("batch_size"), options.pop("seq_len")
    several = Estimates(model, **options)
    for index, strategy in enumerate(strategies):
        try:
            yield _row(several, strategy, room, *sizes)
        except ActCompressError as error:
            if index == 0:
                raise
            yield Row(strategy, None, why_not=str(error))


def _row(several: Estimates, strategy: Strategy, room: int | None, batch_size: int, seq_len: int) -> Row:
    config = strategy.config if strategy.checkpoint_input is None else strategy.resolved
    found = several.estimate(batch_size, seq_len, config, strategy.checkpointing)
    peaks = {batch_size: found.device_bytes}
    if room is None:
        return Row(strategy, found, peaks)

    def peak(batch_size: int) -> int:
        return several.device_bytes(batch_size, seq_len, config, strategy.checkpointing)

    return Row(strategy, found, peaks, _largest(peaks, room, found.device_bytes - found.step_peak_bytes, peak))


def _largest(peaks: dict[int, int], room: int, state: int, peak: Callable[[int], int]) -> int:
    """The largest batch size within `room`, by the same search as on a card; adds what it looks at to `peaks`."""
    from ..memory.batch_size_report import BatchSizeTrial
    from ..memory.batch_size_search import Search

    start = next(iter(peaks))
    search = Search(start, max(MOST, start), _ESTIMATES)
    while not search.settled(room) and (batch_size := search.candidate(room)) is not None:
        if batch_size not in peaks:
            peaks[batch_size] = peak(batch_size)
        search.add(BatchSizeTrial(batch_size, peaks[batch_size] <= room, peaks[batch_size]), state)
    return max((trial.batch_size for trial in search.tried if trial.fits), default=0)
