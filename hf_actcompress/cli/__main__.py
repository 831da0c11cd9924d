"""`python -m hf_actcompress.cli`."""

from __future__ import annotations

from . import app

app()
