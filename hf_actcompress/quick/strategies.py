"""The strategies in the table of `estimate`; the page reads them from the same `strategies.json`."""

from __future__ import annotations

import json
from pathlib import Path

# name -> (what the model is patched with, checkpointing, codec of the checkpoints)
STRATEGIES: dict[str, tuple[str | None, bool, str | None]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
