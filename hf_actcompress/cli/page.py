"""`hf-actcompress page`: estimates in a browser, out of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import writable

Out = Annotated[Path, typer.Option(help="Where to write the page.")]


def page(out: Out = Path("page.html")) -> None:
    """Write a page that makes estimates in any browser.

    It takes a model or a pasted config, a card and a batch, and needs no server or network. Its numbers are those of
    `estimate --quick`, within 3% of `estimate`, for the architectures that it lists.
    """
    from ..quick.page import page as text

    target = writable("--out", out) or out
    target.write_text(text(), encoding="utf-8")
    typer.echo(f"wrote {target}: open it in a browser")
