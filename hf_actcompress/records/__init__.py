"""How an activation comes back in backward: kept (`Stored`) or recomputed from what is kept (`Derived`).

Producers `declare` a tensor as derived. Consumers ask `record_of` for the record of their input, pass the records that
they need to `save`, and get the values from `load` in their backward. So a consumer of a derived tensor keeps nothing
of its own. This package is the only code that stores anything on `ctx`.
"""

from __future__ import annotations

from ._current import current, stock_only
from .adapted import AdaptedWeight
from .hooks import kept_through
from .module_hooks import ModuleHooks, may_write, places_of
from .nested import replaced, tensors_in, without_inference
from .net import netted
from .outside import hooks_outside
from .own_ops import applied, as_stock_saves
from .padding import (
    Padding,
    checkpointed,
    dropping,
    is_dropped,
    keep,
    padding_in,
    padding_of,
    restores_rows,
    rows_in_force,
    rows_left_out,
    shares_rows,
)
from .record import Derived, Pending, Recipe, Record, Stored, is_lossless, parameter, stored_exact
from .registry import (
    apart,
    clear,
    declare,
    declare_as,
    declare_in_order,
    encoded,
    forget,
    frame,
    in_frame,
    known_record,
    live_entries,
    record_in_order_of,
    record_of,
    shared_copy,
    shared_derivation,
    whole_record_of,
)
from .repeated_rows import RepeatedRows, repeated_rows_of
from .saving import load, load_one, load_packed, save
from .storages import storage_sizes, storages_of

__all__ = [
    "AdaptedWeight",
    "Derived",
    "ModuleHooks",
    "Padding",
    "Pending",
    "Recipe",
    "Record",
    "RepeatedRows",
    "Stored",
    "apart",
    "applied",
    "as_stock_saves",
    "checkpointed",
    "clear",
    "current",
    "declare",
    "declare_as",
    "declare_in_order",
    "dropping",
    "encoded",
    "forget",
    "frame",
    "hooks_outside",
    "in_frame",
    "is_dropped",
    "is_lossless",
    "keep",
    "kept_through",
    "known_record",
    "live_entries",
    "load",
    "load_one",
    "load_packed",
    "may_write",
    "netted",
    "padding_in",
    "padding_of",
    "parameter",
    "places_of",
    "record_in_order_of",
    "record_of",
    "repeated_rows_of",
    "replaced",
    "restores_rows",
    "rows_in_force",
    "rows_left_out",
    "save",
    "shared_copy",
    "shared_derivation",
    "shares_rows",
    "stock_only",
    "storage_sizes",
    "storages_of",
    "stored_exact",
    "tensors_in",
    "whole_record_of",
    "without_inference",
]
