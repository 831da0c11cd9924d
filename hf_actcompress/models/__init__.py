"""What of transformers (and PEFT) becomes what: tables, and the checks that a row really describes a module.

This is the only place with transformers class names. `find_site` asks the rows in order and returns where and how a
module is patched, or why it is left alone.
"""

from __future__ import annotations

from .rules import Places, find_site
from .sites import Declined, Site

__all__ = ["Declined", "Places", "Site", "find_site"]
