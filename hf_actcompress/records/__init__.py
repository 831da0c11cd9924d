"""How an activation comes back in backward: kept (`Stored`) or recomputed from what is kept (`Derived`).

Producers `declare` a tensor as derived; consumers ask `record_of` for the record of their input and hand the records
they need to `save`; their backward gets the values from `load`. A consumer of a derived tensor thereby keeps nothing
of its own. This package is the only code that touches storage on `ctx`.
"""

from __future__ import annotations

from .record import Derived, Record, Stored, raw
from .registry import clear, declare, declare_as, frame, live_entries, record_of, shared_copy, shared_derivation
from .saving import load, save

__all__ = [
    "Derived",
    "Record",
    "Stored",
    "clear",
    "declare",
    "declare_as",
    "frame",
    "live_entries",
    "load",
    "raw",
    "record_of",
    "save",
    "shared_copy",
    "shared_derivation",
]
