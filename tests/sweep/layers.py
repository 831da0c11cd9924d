"""Which layers of a full-size config a tiny one keeps: one of every kind that it names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .rules import LAYERS

MOST = 6
# names of lists of layer numbers, in contrast to lists with one entry for each layer
_NUMBERS = re.compile(
    r"(_layers|_indexes|_indices|_idxs|_layer_ids|layers_indices|_ids|vision_feature_layer|^layer_ids)$"
)

# these number the levels of a pyramid, not layers
_OTHER_NUMBERS = {"encode_proj_layers", "encoder_projection_indices"}


def layer_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say how many layers there are and of what kind, with a representative of each kind.

    A list with one entry per layer says something about each layer; so does a list of layer numbers.
    """
    counts = {k: v for k, v in fields.items() if LAYERS.match(k) and type(v) is int and v > 0}
    if not counts:
        return {}
    total = counts.get("num_hidden_layers") or next(iter(counts.values()))
    each = {k: v for k, v in fields.items() if _one_entry_per_layer(v, total) and k not in ("id2label",)}
    numbers = {
        k: v
        for k, v in fields.items()
        if k not in each and k not in _OTHER_NUMBERS and _NUMBERS.search(k) and _numbers_layers(v, total)
    }
    kept = _representatives(each, numbers, total)
    out: dict[str, Any] = {k: len(kept) if v == total else min(v, 2) for k, v in counts.items()}
    out |= {k: type(v)(v[i] for i in kept) for k, v in each.items()}
    return out | {k: _renumbered(v, kept, total) for k, v in numbers.items()}


def _one_entry_per_layer(value: Any, total: int) -> bool:
    return isinstance(value, (list, tuple)) and total > 2 and len(value) == total


def _numbers_layers(value: Any, total: int) -> bool:
    plain = isinstance(value, (list, tuple)) and len(value) > 0
    return plain and all(type(i) is int and -total - 1 <= i <= total for i in value)


def _representatives(each: Mapping[str, Sequence[Any]], numbers: Mapping[str, Sequence[int]], total: int) -> list[int]:
    """The first layer of every kind, at least two layers."""
    kinds: dict[str, int] = {}
    for i in range(total):
        kind = repr(([v[i] for v in each.values()], [i in v for v in numbers.values()]))
        kinds.setdefault(kind, i)
    chosen = sorted(kinds.values())[:MOST]
    rest = [i for i in range(total) if i not in chosen]
    return sorted(chosen + rest[: max(0, 2 - len(chosen))])


def _renumbered(value: Sequence[int], kept: Sequence[int], total: int) -> Any:
    """The same layers under their new numbers; the last layer if none of them was kept."""
    new = [kept.index(i) for i in value if i in kept] or [len(kept) - 1 if value else 0]
    return type(value)(dict.fromkeys(i if value[0] >= 0 else i - len(kept) for i in new))  # type: ignore[call-arg]
