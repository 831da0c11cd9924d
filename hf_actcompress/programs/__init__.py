"""Layers as programs: a whole half of a layer in one autograd Function, where that is proved to be the same.

`find_program` says of a layer whose leaves are patched whether it can run so, or why it goes on leaf by leaf.
"""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import CompressionConfig
from ..models.sites import Declined, Site
from ..modules.base import Settings
from .gated_layer import GatedLayer, find_parts
from .layer import LayerPrograms, ProgramLayerMixin
from .proof import PatchLeaves, prove

__all__ = ["find_program"]


def find_program(
    layer: nn.Module, config: CompressionConfig, patch_leaves: PatchLeaves | None = None
) -> Site | Declined | None:
    """The site of a layer that runs as programs; why not; None for what is no layer, or if nobody asked for programs.

    Args:
        layer: Its leaves are patched.
        config: What they were patched with.
        patch_leaves: Patches the leaves of a module in the same way, for the proof; None: what has been proved counts.
    """
    if not config.programs or not isinstance(layer, GradientCheckpointingLayer):
        return None
    if config.drop_padding:
        return _leaf_by_leaf("programs keep padding rows, which drop_padding=True does not want")
    if config.tiled_mlp:
        return _leaf_by_leaf("programs compute all rows at once, which tiled_mlp does not want")
    parts = find_parts(layer)
    if not isinstance(parts, GatedLayer):
        return _leaf_by_leaf(parts or "no program knows its structure")
    keywords = prove(layer, parts, patch_leaves)
    if isinstance(keywords, str):
        return _leaf_by_leaf(keywords)
    return Site(ProgramLayerMixin, Settings("layer", "program", (LayerPrograms.of(parts, keywords),)))


def _leaf_by_leaf(reason: str) -> Declined:
    return Declined("layer", f"{reason}; it runs leaf by leaf")
