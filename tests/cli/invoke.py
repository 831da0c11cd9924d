"""Run the commands in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from hf_actcompress.cli import app

SIZES = ("--batch-size", "2", "--seq-len", "16")


def run(*arguments: str):
    return CliRunner().invoke(app, arguments)
