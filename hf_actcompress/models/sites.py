"""The answers of a rule about a module: how it is patched, or why it is left alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..config import CompressionConfig
from ..modules.base import Settings
from ..roles import Role


@dataclass(frozen=True)
class Site:
    """A module that can be patched: the mixin that it gets and what the mixin is told."""

    mixin: type
    settings: Settings


@dataclass(frozen=True)
class Declined:
    """A module that a rule knows and leaves alone, and why."""

    role: Role
    reason: str


def norm_keeps(settings: Settings, config: CompressionConfig, reasons: list[str]) -> Settings:
    """A norm's settings under the config: it keeps its input if its output cannot be inverted."""
    if config.norm_variant == "output" and reasons:
        return replace(settings, note=f"keeps its input: {'; '.join(reasons)}")
    return replace(settings, keeps=config.norm_variant)
