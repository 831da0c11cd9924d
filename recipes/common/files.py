"""Replaces files so that a reader always finds a whole file, also while they are written."""

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write the text to a new file beside `path`, and put that file in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    os.replace(beside, path)
