"""One table of colours for parts of the memory, roles and ways of training: pages and pictures take theirs from it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import cycle

from .preset_lines import PRESET_LINES

# ways of training; each has a contrast of 3 or more to a white and to a dark page, because curves have no border
STOCK, OTHERS, EXACT, LOSSY = "#808080", "#998822", "#4477aa", "#ee6677"
# parts of the peak, and roles of what is kept; roles that do similar work have shades of one hue
COLOURS = {
    "weights": "#4477aa",
    "gradients": "#66ccee",
    "optimizer states": "#228833",
    "kept for backward": "#ccbb44",
    "transient": "#ee6677",
    "optimizer's step, beyond": "#77dd99",
    "device context (allowance)": "#aa3377",
    "norm": "#44aa99",
    "batch_norm": "#2f776b",
    "attention": "#7766cc",
    "activation": "#ddaa33",
    "gated_mlp": "#bb7711",
    "tiled_mlp": "#885500",
    "experts": "#ffcc77",
    "linear": "#999933",
    "conv2d": "#bbbb66",
    "conv": "#cccc99",
    "adapter": "#666633",
    "dropout": "#cc99bb",
    "checkpoint": "#bb55aa",
    "checkpoint_input": "#dd88cc",
    "in_parts": "#882277",
    "layer": "#eeaadd",
    "module": "#eebbcc",
    "embedding": "#88cc66",
    "tokens": "#aaddaa",
    "loss": "#cc3311",
    "loss_head": "#ee8866",
    "functions": "#bbbbbb",
    "other": "#999999",
}
_KEPT = "kept: "


def way_colour(name: str) -> str:
    """The colour of a way of training by its name, such as "int8", "exact+checkpointing" or "exact layers-compiled"."""
    preset = re.split("[,+ ]", name, maxsplit=1)[0]
    if preset in PRESET_LINES:
        return EXACT if PRESET_LINES[preset].startswith("exact") else LOSSY
    return {"stock": STOCK, "calibrated": LOSSY}.get(preset, OTHERS)


def part_colours(names: Iterable[str]) -> dict[str, str]:
    """The colour of each part or role of a picture.

    A name that is not in the table, such as an option of a plan, gets a colour that no other name of the picture has;
    if there are none left, they are used again.
    """
    known = {name: COLOURS.get(name.removeprefix(_KEPT)) for name in names}
    left = cycle([colour for colour in COLOURS.values() if colour not in known.values()] or list(COLOURS.values()))
    return {name: colour or next(left) for name, colour in known.items()}
