"""What all pictures of results have in common: colours by role, values at the bars, and the data that they show."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_actcompress import PRESETS

# stock, other libraries' ways, this package's exact ways, its lossy ones: a test holds these to quick/colours.py
STOCK, OTHERS, EXACT, LOSSY = "#808080", "#998822", "#4477aa", "#ee6677"
# the entry of a PNG that says which data it shows
KEY = "Source"


def colour_of(mode: str) -> str:
    """The colour of a mode of the benchmark by its name."""
    name = mode.partition(",")[0].partition("+")[0]
    if name in PRESETS:
        return EXACT if PRESETS[name].lossless else LOSSY
    return {"stock": STOCK, "calibrated": LOSSY}.get(name, OTHERS)


def bars(axes: Any, title: str, names: Sequence[str], values: Sequence[float], form: str) -> None:
    """Horizontal bars with their values, and a line at stock's."""
    drawn = axes.barh(names, values, color=[colour_of(name) for name in names])
    axes.bar_label(drawn, [format(value, form) for value in values], padding=3, fontsize=8)
    if "stock" in names:
        axes.axvline(values[list(names).index("stock")], color=STOCK, linewidth=0.8, linestyle="--", zorder=0)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def digest(*sources: Path) -> str:
    """What identifies the data of some files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def save(figure: Any, path: Path, *sources: Path, dpi: int = 120) -> None:
    """Write a PNG that names the data it shows, so that a test finds pictures of other data."""
    figure.savefig(path, dpi=dpi, metadata={KEY: digest(*sources)})
