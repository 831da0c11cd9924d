"""Run the commands in this process."""

from __future__ import annotations

import re

from typer.testing import CliRunner

from hf_actcompress.cli import app

SIZES = ("--batch-size", "2", "--seq-len", "16")


def unwrapped(text: str) -> str:
    """Prose with each sentence in one line again. Lines of remedies begin with two spaces and stay lines."""
    lines = re.sub(r"\n      (?=\S)", " ", text)
    return re.sub(r"\n  (?=\S)(?!.*, would)", " ", lines)


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)
