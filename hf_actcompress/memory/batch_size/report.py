"""The result of a search for the batch size, and how it is shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...display.report import Report
from ...display.tables import Table
from ...quick.sizes import readable_size


@dataclass(frozen=True)
class BatchSizeTrial:
    """One candidate.

    Args:
        batch_size: Size of the batches.
        fits: Whether the steps ran below the limit.
        peak_bytes: The highest number of bytes in use on the device; None if memory ran out.
        seconds: Median time of a step; None if it does not fit.
        tokens: Tokens of a batch; None if that is not known.
        reason: Why it does not fit.
    """

    batch_size: int
    fits: bool
    peak_bytes: int | None
    seconds: float | None = None
    tokens: int | None = None
    reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.seconds if self.tokens is not None and self.seconds else None

    @property
    def samples_per_second(self) -> float | None:
        return self.batch_size / self.seconds if self.seconds else None

    def __str__(self) -> str:
        if not self.fits:
            return f"batch size {self.batch_size}: does not fit, {self.reason}"
        rate, unit = self.tokens_per_second, "tokens/s"
        if rate is None:
            rate, unit = self.samples_per_second, "samples/s"
        return f"batch size {self.batch_size}: peak {readable_size(self.peak_bytes or 0)}, {rate or 0:,.0f} {unit}"


@dataclass(frozen=True)
class BatchSizeReport(Report):
    """The result of a search. It prints with rich and serialises.

    Args:
        trials: The trials in the order in which they ran.
        limit_bytes: Bytes that may be used.
        settled: Whether a batch of `largest` + 1 was tried, or is excluded by the measured peaks.
    """

    trials: tuple[BatchSizeTrial, ...]
    limit_bytes: int
    settled: bool

    @property
    def largest(self) -> int:
        """The largest batch size that was tried and fits; 0 if none does."""
        return max((trial.batch_size for trial in self.trials if trial.fits), default=0)

    @property
    def fastest(self) -> int:
        """The tried batch size with the most tokens (or samples) per second; 0 if none fits."""
        fitting = [trial for trial in self.trials if trial.fits]
        if not fitting:
            return 0
        return max(fitting, key=lambda t: (t.tokens_per_second or 0.0, t.samples_per_second or 0.0)).batch_size

    def derived(self) -> dict[str, Any]:
        """What is computed from the trials, and their rates."""
        trials = [
            {**asdict(t), "tokens_per_second": t.tokens_per_second, "samples_per_second": t.samples_per_second}
            for t in self.trials
        ]
        return {"largest": self.largest, "fastest": self.fastest, "trials": trials}

    def __str__(self) -> str:
        if not self.largest:
            return f"no batch size that was tried fits into {readable_size(self.limit_bytes)}"
        more = "" if self.settled else ", and a larger one may"
        return (
            f"batch size {self.largest} fits into {readable_size(self.limit_bytes)}{more}; "
            f"{self.fastest} was the fastest of {len(self.trials)} that were tried"
        )

    def tables(self) -> tuple[Table, ...]:
        """The table, with a row per trial."""
        numbers = ("batch size", "peak", "seconds", "tokens/s", "samples/s")
        rows = [_cells(t) for t in sorted(self.trials, key=lambda t: t.batch_size)]
        return (Table((*numbers, "fits"), rows, numbers),)


def _cells(t: BatchSizeTrial) -> tuple[str, ...]:
    peak = "-" if t.peak_bytes is None else readable_size(t.peak_bytes)
    rates = (_number(t.seconds, ".3f"), _number(t.tokens_per_second), _number(t.samples_per_second, ",.1f"))
    return (str(t.batch_size), peak, *rates, "yes" if t.fits else f"no: {t.reason}")


def _number(value: float | None, form: str = ",.0f") -> str:
    return "-" if value is None else format(value, form)
