"""Pictures of memory: bytes by role, bytes over time. matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

from ..errors import MissingExtraError
from ..quick.colours import part_colours, way_colour

if TYPE_CHECKING:
    from os import PathLike


# a path whose suffix decides the format, or a binary file for a PNG
Target: TypeAlias = "str | PathLike[str] | IO[bytes]"


class Curve(Protocol):
    """Bytes held over time, such as a MemoryTimeline."""

    @property
    def seconds(self) -> Sequence[float]: ...
    @property
    def bytes(self) -> Sequence[int]: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def backward(self) -> tuple[float, float] | None: ...
    @property
    def optimizer(self) -> tuple[float, float] | None: ...


def new_figure(what: str, **options: Any) -> Any:
    """A matplotlib figure of its own, outside of pyplot.

    Raises MissingExtraError, which names what is drawn, if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs matplotlib, which is not installed: pip install 'hf-actcompress[plot]'"
        ) from error
    return Figure(layout="constrained", **options)


def draw_roles(bars: Mapping[str, Mapping[str, int]], target: Target) -> None:
    """Stacked bars of kept bytes (strategy -> role -> bytes), one bar per strategy, in the order given.

    Raises MissingExtraError if matplotlib is not installed.
    """
    figure = new_figure("a picture of roles", figsize=(9, 1.6 + 0.4 * len(bars)))
    axes = figure.add_subplot()
    names = list(bars)
    totals: Counter[str] = Counter()
    for sizes in bars.values():
        totals.update(sizes)
    scale, unit = _unit(max((sum(sizes.values()) for sizes in bars.values()), default=0))
    left = [0.0] * len(names)
    for role, colour in part_colours(role for role, _ in totals.most_common()).items():
        widths = [bars[name].get(role, 0) / scale for name in names]
        axes.barh(names, widths, left=left, label=role, color=colour)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} kept for backward")
    figure.legend(loc="outside right upper")
    save(figure, target)


def draw_timelines(timelines: Mapping[str, Curve], target: Target) -> None:
    """Memory over time in a step, one curve per strategy; a dotted line where backward begins.

    Raises MissingExtraError if matplotlib is not installed.
    """
    figure = new_figure("a picture of a timeline", figsize=(9, 3.6))
    axes = figure.add_subplot()
    scale, unit = _unit(max((t.peak_bytes for t in timelines.values()), default=0))
    for name, timeline in timelines.items():
        # each curve is as wide as the picture: profiled times of single steps say nothing about how fast they are
        percent = 100 / ((timeline.seconds[-1] if timeline.seconds else 0) or 1.0)
        colour = way_colour(name)
        axes.step(
            [percent * x for x in timeline.seconds],
            [size / scale for size in timeline.bytes],
            where="post",
            label=name,
            color=colour,
        )
        for span in (timeline.backward, timeline.optimizer):
            if span is not None:
                axes.axvline(percent * span[0], color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="% of the time; dotted: backward begins, the optimizer begins", ylabel=f"{unit} above the start")
    axes.set_ylim(bottom=0)
    if any(timelines):
        axes.legend()
    save(figure, target)


def _unit(nbytes: int) -> tuple[int, str]:
    for exponent, unit in ((30, "GiB"), (20, "MiB")):
        if nbytes >= 2**exponent:
            return 2**exponent, unit
    return 2**10, "KiB"


def save(figure: Any, target: Target) -> None:
    """Write a figure where `Report.plot` was told to."""
    if hasattr(target, "write"):
        figure.savefig(target, format="png", dpi=120)
    else:
        figure.savefig(target, dpi=120)
