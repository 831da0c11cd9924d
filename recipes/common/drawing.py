"""What all pictures of results have in common: colours by role, values at the bars, and the data that they show."""

import hashlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_actcompress import PRESETS

# stock, other libraries' ways, this package's exact ways, its lossy ones: a test holds these to quick/colours.py
STOCK, OTHERS, EXACT, LOSSY = "#808080", "#998822", "#4477aa", "#ee6677"
ROLES = {
    STOCK: "stock",
    OTHERS: "without hf-actcompress",
    EXACT: "hf-actcompress, exact",
    LOSSY: "hf-actcompress, lossy",
}
# marks a line that no value is printed across
_KEEP_CLEAR = "keep clear"
# letters of a title per inch
_LETTERS = 13
# the entry of a PNG that says which data it shows
KEY = "Source"


def colour_of(mode: str) -> str:
    """The colour of a mode of the benchmark by its name, such as "int8+compile" or "exact layers-compiled"."""
    name = re.split("[,+ ]", mode, maxsplit=1)[0]
    if name in PRESETS:
        return EXACT if PRESETS[name].lossless else LOSSY
    return {"stock": STOCK, "calibrated": LOSSY}.get(name, OTHERS)


def bars(axes: Any, title: str, names: Sequence[str], values: Sequence[float], form: str) -> None:
    """Horizontal bars with their values, and a line at stock's."""
    drawn = axes.barh(names, values, color=[colour_of(name) for name in names])
    axes.bar_label(drawn, [format(value, form) for value in values], padding=3, fontsize=8)
    if "stock" in names:
        reference(axes, values[list(names).index("stock")])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=9)
    plain(axes)


def plain(axes: Any) -> None:
    """Small figures at the ticks, and no frame."""
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def reference(axes: Any, value: float) -> None:
    """A vertical line at a value that bars are compared with; `save` moves what is printed across it."""
    axes.axvline(value, color=STOCK, linewidth=0.8, linestyle="--", zorder=0, gid=_KEEP_CLEAR)


def head(figure: Any, text: str) -> None:
    """A title whose lines are broken where they are wider than the figure."""
    width = int(_LETTERS * figure.get_figwidth())
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in text.splitlines()), fontsize=10)


def legend(figure: Any, modes: Iterable[str], note: str = "") -> None:
    """What the colours of some modes stand for, below the panels, and a note in small letters."""
    from matplotlib.patches import Patch

    used = {colour_of(mode) for mode in modes}
    keys = [Patch(color=colour, label=role) for colour, role in ROLES.items() if colour in used]
    columns = max(1, min(len(keys), int(figure.get_figwidth() / 1.9)))
    note = textwrap.fill(note, int(1.4 * _LETTERS * figure.get_figwidth()))
    small: dict[str, Any] = {"fontsize": 8, "title_fontsize": 7.5, "frameon": False}
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, title=note or None, **small)


def _clear(figure: Any) -> None:
    """Move each value that a reference line crosses to the right of that line."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        for line in (line for line in axes.lines if line.get_gid() == _KEEP_CLEAR):
            value = line.get_xdata()[0]
            place = axes.transData.transform((value, 0))[0]
            for text in axes.texts:
                box = text.get_window_extent()
                if box.x0 - 2 < place < box.x1 + 2:
                    text.xy = (value, text.xy[1])


def digest(*sources: Path) -> str:
    """What identifies the data of some files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def save(figure: Any, path: Path, *sources: Path, dpi: int = 120) -> None:
    """Write a PNG that names the data it shows, so that a test finds pictures of other data."""
    _clear(figure)
    figure.savefig(path, dpi=dpi, metadata={KEY: digest(*sources)})
