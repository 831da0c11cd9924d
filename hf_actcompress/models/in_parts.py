"""Attention that is computed in parts where that needs less memory: its module runs a copy of its stock forward.

Eager attention computes some rows of queries at a time and keeps no probabilities; a mask that follows from positions
need not be made (attention_rows.py). The backward of linear attention computes some tokens at a time if the config asks
for tiles (linear_attention.py). In all other calls the copy does what the stock forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from .. import compilation
from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import ModuleMixin, Settings
from ..roles import Role
from .attention_rows import copy_in_rows
from .linear_attention import copy_in_segments, segment_of
from .sites import Site


@dataclass(frozen=True, kw_only=True)
class InPartsSettings(Settings):
    """How attention is computed in parts.

    Args:
        segment: How many tokens of a linear attention are computed at a time; 0: all.
    """

    segment: int = 0


class InPartsMixin(ModuleMixin):
    """A module whose code finds functions of ours where it looks for those that compute attention."""

    actcompress: InPartsSettings | None

    def stock_forward(self) -> Callable[..., Any]:
        """A copy of the stock forward, bound to the module."""
        kind: Any = self.stock_class
        settings = self.actcompress
        found = copy_in_rows(kind) or copy_in_segments(kind, 0 if settings is None else settings.segment)
        return super().stock_forward() if found is None or not found.is_of(kind) else partial(found.copy, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the stock forward returns."""
        settings = self.actcompress
        # in a graph, linear attention is one node
        as_node = compilation.is_traced_plan() and settings is not None and settings.segment
        if settings is None or (compilation.is_traced() and not as_node):
            return super().forward(*args, **kwargs)
        return self.stock_forward()(*args, **kwargs)


def find_in_parts(module: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of a module that computes eager attention or linear attention; None for any other one."""
    if not (config.selective and config.net and config.derive_linear) or "forward" in module.__dict__:
        return None
    kind: Any = type(module)
    implementation = getattr(module.__dict__.get("config"), "_attn_implementation", None)
    in_rows = implementation == "eager" and copy_in_rows(kind) is not None
    segment = 0 if in_rows or copy_in_segments(kind, segment_of(config)) is None else segment_of(config)
    if not in_rows and not segment:
        return None
    codec, keeps = CODECS[config.other], "what its own code keeps"
    return Site(InPartsMixin, InPartsSettings(Role.IN_PARTS, codec=codec, keeps=keeps, segment=segment))
