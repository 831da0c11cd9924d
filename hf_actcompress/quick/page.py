"""The page: one file that holds the data, the formula in JavaScript and a form, and fetches nothing."""

from __future__ import annotations

import json
from pathlib import Path

from ..versions import version_of
from .cards import CARDS
from .colours import COLOURS
from .config_rules import rules
from .headroom import HEADROOM
from .question import classes
from .strategies import STRATEGIES, TIMES

_HERE = Path(__file__).parent


def page() -> str:
    """The HTML text."""
    data = {
        "classes": classes(),
        "rules": rules(),
        "presets": json.loads((_HERE / "presets.json").read_text(encoding="utf-8")),
        "strategies": STRATEGIES,
        "times": TIMES,
        "cards": {name: mebibytes * 2**20 for name, mebibytes in CARDS.items()},
        "headroom": HEADROOM,
        "colours": COLOURS,
    }
    parts = {
        "/*VERSION*/": version_of("hf-actcompress") or "from its source",
        "/*STYLE*/": _resource("style.css"),
        # no text of the data may end the script
        "/*DATA*/": f"const DATA = {json.dumps(data, separators=(',', ':'))};".replace("</", "<\\/"),
        "/*FORMULA*/": _resource("formula.js"),
        "/*VIEW*/": _resource("view.js"),
    }
    text = _resource("page.html")
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def _resource(name: str) -> str:
    return (_HERE / "resources" / name).read_text(encoding="utf-8")
