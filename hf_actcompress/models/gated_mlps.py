"""Gated MLPs, recognised by their structure: the names of their children and what their forward does with them."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import patch_instance
from ..modules.gated_mlp import FusedGatedMLPMixin, GatedMLPSettings, SplitGatedMLPMixin, T5GatedMLPMixin
from ..roles import Role
from .probe import (
    DTYPES,
    StandIn,
    asked_once,
    bare_copy,
    probe_rows,
    same_bits,
    takes_one_tensor,
    undisturbed,
)
from .sites import Declined, Site
from .tiled_mlps import tiled_settings


@dataclass(frozen=True)
class GatedMLP:
    """A row: the mixin, and the names of the children in the mixin's order.

    `act` names the activation among the children, where it comes after the projection that makes the output.
    """

    mixin: type
    children: tuple[str, ...]
    act: str


GATED_MLPS: tuple[GatedMLP, ...] = (
    # Llama, Mistral, Qwen, Gemma and some 130 more
    GatedMLP(SplitGatedMLPMixin, ("gate_proj", "up_proj", "down_proj", "act_fn"), "act_fn"),
    GatedMLP(SplitGatedMLPMixin, ("w1", "w3", "w2", "act_fn"), "act_fn"),
    # Phi-3, GLM
    GatedMLP(FusedGatedMLPMixin, ("gate_up_proj", "down_proj", "activation_fn"), "activation_fn"),
    # ModernBERT
    GatedMLP(FusedGatedMLPMixin, ("Wi", "Wo", "act", "drop"), "act"),
    # T5 v1.1, mT5, UMT5
    GatedMLP(T5GatedMLPMixin, ("wi_0", "wi_1", "wo", "act", "dropout"), "act"),
)


def find_gated_mlp(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a module that has the children of a row, and only those, and computes what the row says."""
    names = set(module._modules)
    for row in GATED_MLPS:
        if not set(row.children) <= names:
            continue
        last = row.children[row.children.index(row.act) - 1]
        settings = GatedMLPSettings(Role.GATED_MLP, codec=CODECS[config.mlp], children=row.children, last=last)
        # compared without tiles, because a tile is a call of the same code
        if asked_once(module, _same_with_stand_ins, row, settings):
            return Site(row.mixin, tiled_settings(settings, module, config))
        return Declined(Role.GATED_MLP, f"has {', '.join(row.children)} but its forward does something else with them")
    return None


def _same_with_stand_ins(module: nn.Module, row: GatedMLP, settings: GatedMLPSettings) -> bool:
    """Run the module's forward and the mixin's on the same stand-in children: no weight is read."""
    if not takes_one_tensor(module):
        return False
    probe = bare_copy(module)
    probe._buffers = copy.deepcopy(module._buffers)
    for index, name in enumerate(row.children):
        if name in ("dropout", "drop"):
            probe._modules[name] = nn.Identity()
        elif name != row.act:
            probe._modules[name] = StandIn(index, halves=row.mixin is FusedGatedMLPMixin and index == 0)
    probe._modules[row.act] = bare_copy(probe._modules[row.act])
    xs = [probe_rows(24).to(dtype) for dtype in DTYPES]
    try:
        with undisturbed():
            stock = [probe(x.clone()) for x in xs]
            patch_instance(probe, row.mixin, settings)
            ours = [probe(x) for x in xs]
    except Exception:
        return False
    return all(map(same_bits, stock, ours))
