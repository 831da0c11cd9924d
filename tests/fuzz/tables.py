"""Tables of cases: what happens between forward and backward, and hooks, over 12 families and three presets.

What the tables do not name (plans, dropout, attention, checkpointing, adapters) is taken from a hash of the case's
name: every value comes up in many rows, and a row is the same every day.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.between import BETWEEN
from tests.fuzz.case import Case
from tests.fuzz.hooks import KINDS, PLACES

# RoFormer, Bloom and Mamba have attention or a scan of their own making
FAMILIES = (
    "llama", "gpt2-gelu-tanh", "bert", "t5", "qwen3", "gemma3", "roformer", "bloom", "mixtral", "falcon", "vit",
    "mamba",
)  # fmt: skip
PRESETS = ("exact", "int8", "long")
OTHERS: dict[str, tuple[Any, ...]] = {
    "plans": (True, False),
    "dropout": (0.1, 0.0),
    "attention": ("sdpa", "sdpa", "eager"),
    "checkpointing": ("none", "none", "none", "non-reentrant", "reentrant"),
    "lora": ("none", "none", "plain", "dropout", "two"),
    "patch_first": (False, True),
    "padding": ("none", "right", "left"),
}
# places that a family has no module of, by the patterns of tests/fuzz/hooks.py
WITHOUT = {
    "llama": ("dropout",), "qwen3": ("dropout",), "gemma3": ("dropout",), "mixtral": ("dropout",),
    "vit": ("embedding",), "mamba": ("dropout", "mlp"),
}  # fmt: skip


def _others(name: str) -> dict[str, Any]:
    number, fields = zlib.crc32(name.encode()), {}
    for key, values in OTHERS.items():
        number, index = divmod(number, len(values))
        fields[key] = values[index]
    return fields


def _case(name: str, preset: str, **fields: Any) -> Case:
    case = Case(preset=preset, batch=2, length=7, **fields, **_others(name)).tidy()
    if preset == "int8" and case.lora != "none" and case.checkpointing != "none":
        # adapters alone, of layers that are recomputed from rounded inputs: no limit tells wrong from lossy
        case = replace(case, checkpointing="none")
    return case


def between_cases() -> Iterator[tuple[str, Case]]:
    """Each row of `BETWEEN` with each family and preset."""
    for family in FAMILIES:
        for between in BETWEEN:
            for preset in PRESETS:
                name = f"{family}-{between}-{preset}"
                yield name, _case(name, preset, family=family, between=between)


def hook_cases() -> Iterator[tuple[str, Case]]:
    """Each kind of hook at each place with each family. The presets take turns."""
    for family in FAMILIES:
        for index, (kind, place) in enumerate((kind, place) for kind in KINDS for place in PLACES):
            if place not in WITHOUT.get(family, ()):
                name, preset = f"{family}-{kind}-{place}", PRESETS[index % len(PRESETS)]
                at = zlib.crc32(name.encode()) % 8
                yield name, _case(name, preset, family=family, hook=kind, place=place, at=at)
