"""Which modules of transformers and PEFT are patched, and how: tables, and checks that a row describes a module.

This is the only place with transformers class names. `find_site` asks the rules of one table in order
(`rules.py`) and returns how a module is patched, or why it is left alone.
"""

from __future__ import annotations

from .rules import Places, find_site
from .sites import Declined, Site

__all__ = ["Declined", "Places", "Site", "find_site"]
