"""Chooses the next batch size to try from those that were tried. It is arithmetic only."""

from __future__ import annotations

from .report import BatchSizeTrial

# growth from one trial to the next if the peaks give no bound
_GROWTH = 16
# a size that surely fits is tried if it is larger than the largest that fits by this factor
_WORTH_A_TRIAL = 1.25


class Search:
    """Chooses the next batch size to try: by a line through the measured peaks, between the known bounds.

    Args:
        start: The first size to try.
        largest: The largest size to try.
        trials: The most trials.

    Attributes:
        tried: The trials so far.
    """

    def __init__(self, start: int, largest: int | None, trials: int) -> None:
        for name, value in (("start", start), ("largest", largest), ("trials", trials)):
            if value is not None and value < 1:
                raise ValueError(f"{name} has to be 1 or more, got {value}")
        self.start, self.largest, self.trials = start, largest, trials
        self.tried: list[BatchSizeTrial] = []
        self._state = 0

    def add(self, trial: BatchSizeTrial, state_bytes: int) -> None:
        """Note a trial, and the bytes in use on the device without any activations."""
        self.tried.append(trial)
        self._state = max(self._state, state_bytes)

    @property
    def _fits(self) -> int:
        return max((trial.batch_size for trial in self.tried if trial.fits), default=0)

    @property
    def _fails(self) -> int | None:
        beyond = self.largest + 1 if self.largest is not None else None
        return min((trial.batch_size for trial in self.tried if not trial.fits), default=beyond)

    def settled(self, aim: int) -> bool:
        """Whether no size between the largest that fits and the smallest that does not is left to try."""
        fits, fails = self._fits, self._fails
        if fails is not None and fits + 1 >= fails:
            return True
        line = self._line(aim)
        return fits > 0 and len(self._points) > 1 and line is not None and line <= fits

    def candidate(self, aim: int) -> int | None:
        """The next batch size for a peak of `aim` bytes; None if there is nothing left to learn."""
        left = self.trials - len(self.tried)
        if left <= 0:
            return None
        if not self.tried:
            return min(self.start, self.largest or self.start)
        if self._fits == 0:
            return self._smaller(left, aim)
        if self.settled(aim):
            # half of the largest size that fits is tried only for its throughput
            half = self._fits // 2
            return half if half and all(trial.batch_size != half for trial in self.tried) else None
        return self._between(aim)

    def _smaller(self, left: int, aim: int) -> int | None:
        fails = self._fails
        assert fails is not None
        if fails <= 1:
            return None
        if left == 1:
            return 1
        line = self._line(aim)
        guess = line if line is not None else fails * 7 // 8 if len(self.tried) == 1 else fails // 4
        return min(max(guess, 1), fails - 1)

    def _between(self, aim: int) -> int:
        fits, fails, line = self._fits, self._fails, self._line(aim)
        safe = self._line(aim, safe=True)
        # peaks that do not grow say little: then a size far above is tried, as long as none has failed
        tells = line is not None or fails is not None
        if tells and safe is not None and safe > _WORTH_A_TRIAL * fits and (fails is None or safe < fails):
            return safe
        if line is not None and line <= fits:
            # a line through one point is too steep; this second trial, which cannot fail, gives a second point
            return fits // 2 if fits > 1 else 2
        top = min(fits * _GROWTH, fails - 1 if fails is not None else fits * _GROWTH)
        if line is not None and line <= top:
            return line
        ran_out = [trial for trial in self.tried if not trial.fits and trial.batch_size == fails]
        if not ran_out:
            return top
        # the line was too high once, so it is taken to be a little too high again
        failed = sum(not trial.fits for trial in self.tried)
        return max((fits + top + 1) // 2, top * 7 // 8 if failed == 1 else 0)

    @property
    def _points(self) -> list[tuple[int, int]]:
        return sorted((t.batch_size, t.peak_bytes) for t in self.tried if t.peak_bytes is not None)

    def _line(self, aim: int, safe: bool = False) -> int | None:
        """The batch size whose peak would be `aim`, on a line through the last two points; None if there is none.

        The peaks of small batches are the optimizer's, and do not grow. A line from there to a larger batch rises too
        little, and what it gives may run out of memory. A safe line starts at the bytes without any activations, and
        rises too much if anything.
        """
        points = self._points[-1:] if safe else self._points
        if not points:
            return None
        (b0, p0), (b1, p1) = [(0, self._state), *points][-2:]
        if p1 <= p0:
            return None
        return b0 + int((aim - p0) * (b1 - b0) // (p1 - p0))
