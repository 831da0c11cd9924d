"""Layers by plans: a layer's forward and backward come from its own joint graph.

A layer's code and autograd's own backward of it are traced once per kind of layer, and a plan is made of the graph
(`graphs/`). One autograd Function runs it (`function`), whose backward reads nothing from the module. Each call of a
layer looks for its plan (`layer`, `look`, `given`); plans are shared by layers of one kind (`store`). Calls without a
plan run module by module.
"""

from __future__ import annotations

from torch import nn

from ..codecs import IDENTITY, Codec, packs_alike
from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..graphs.codec_marks import has_attention
from ..models.sites import Site
from ..modules.checkpoint import CHECKPOINT_FUNCTION, CheckpointSettings
from ..roles import Role
from .layer import PlannedLayer
from .possible import why_not
from .showing import show
from .site import LayerSettings, PlannedLayerMixin
from .store import Store, plans_shared, store_for_model
from .units import blocks_named, outside_of, units_of

__all__ = [
    "LayerSettings",
    "PlannedLayer",
    "Store",
    "blocks_named",
    "find_plans",
    "left_out",
    "outside_of",
    "plans_shared",
    "show",
    "store_for_model",
    "units_of",
]


def left_out(model: nn.Module, config: CompressionConfig) -> dict[int, str]:
    """The layers and blocks that run module by module in all calls: by the id of each, the reason."""
    if not config.plans:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    units = units_of(model, config.blocks)
    reasons = {id(unit): why_not(unit, _codec_of_others(config.at(names[id(unit)]))) for unit in units}
    return {unit: reason for unit, reason in reasons.items() if reason}


def _codec_of_others(config: CompressionConfig) -> Codec:
    """The codec of what no patched module keeps."""
    return CODECS[config.other] if config.net else IDENTITY


def _attention_codec(layer: nn.Module, config: CompressionConfig) -> Codec:
    """The codec of what torch's attention reads and returns where the layer's own code calls it."""
    codec = CODECS[config.attention]
    fits = not has_attention(layer) and config.attention_variant != "recomputed" and packs_alike(codec)
    return codec if fits else IDENTITY


def find_plans(
    layer: nn.Module,
    store: Store,
    config: CompressionConfig,
    kept: CheckpointSettings | None,
    role: Role,
) -> Site | None:
    """The site of a layer that runs by plans; None for one that `left_out` names, and for other modules like it.

    Args:
        layer: A layer whose leaves are patched, one of `units_of` its model, or of the modules `outside_of` them.
        store: The plans of the model.
        config: The config of the layer.
        kept: What the layer keeps where it is checkpointed; None: its input as it is.
        role: Whether it is a layer, or a module outside of layers.
    """
    codec, other = _attention_codec(layer, config), _codec_of_others(config)
    if why_not(layer, other):
        return None
    settings = LayerSettings(
        role,
        "plan",
        codec,
        plans=PlannedLayer(store),
        kept=kept,
        function=layer.__dict__.get(CHECKPOINT_FUNCTION),
        other=other,
        selective=config.selective,
        compile=config.compile and role == Role.LAYER,
    )
    return Site(PlannedLayerMixin, settings)
