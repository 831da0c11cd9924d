"""Layers as programs: a layer, or all of it but its attention, as one or two autograd Functions, if proved right.

The layer's code runs once on tensors without data and is written down (`tracing`, `recorder`: a `Tape` of steps). The
tape becomes one program (`whole`), or is cut at its attentions into programs (`schedule`). Each program becomes
straight-line code for forward and backward (`emit`, `program`), with a rule for every operation (`operations`,
`arithmetic`). An ordinary call of the layer runs its programs, any other call runs module by module (`layer`). Programs
are used only after a trial has shown that they are right (`proof`).
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..config import CompressionConfig
from ..models.sites import Declined, Site
from ..modules.checkpoint import CHECKPOINT_FUNCTION, CheckpointSettings
from ..roles import Role
from .layer import LayerPrograms, LayerSettings, ProgramLayerMixin
from .proof import proved
from .refusal import NotStraight
from .tracing import calls_eager

__all__ = ["LayerPrograms", "LayerSettings", "find_program", "is_outdated"]


def find_program(
    layer: nn.Module, config: CompressionConfig, kept: CheckpointSettings | None = None
) -> Site | Declined | None:
    """The site of a layer that runs as programs, or why it does not; None for no layer, or if the config wants none.

    Args:
        layer: A layer whose leaves are patched.
        config: The config with which they were patched.
        kept: What the layer keeps where it is checkpointed; None: its input as it is.
    """
    if not config.programs or not isinstance(layer, GradientCheckpointingLayer):
        return None
    if config.always_in_tiles:
        return _leaf_by_leaf("programs compute all rows at once, which tiled_mlp does not want")
    if not config.selective and any(map(calls_eager, layer.modules())):
        return _leaf_by_leaf("its eager attention would run again in backward, which selective=False does not want")
    try:
        programs = _programs_of(layer)
    except NotStraight as reason:
        return _leaf_by_leaf(str(reason))
    function = layer.__dict__.get(CHECKPOINT_FUNCTION)
    settings = LayerSettings(Role.LAYER, "program", programs=programs, kept=kept, function=function)
    return Site(ProgramLayerMixin, settings)


def _programs_of(layer: nn.Module) -> LayerPrograms:
    """The programs without autocast, or those under bf16 if that fails: weights of mixed dtypes need an autocast."""
    try:
        return LayerPrograms.of(layer, proved(layer, None), None, proved)
    except NotStraight as reason:
        try:
            return LayerPrograms.of(layer, proved(layer, torch.bfloat16), torch.bfloat16, proved)
        except NotStraight:
            raise reason from None


def is_outdated(layer: nn.Module) -> bool:
    """Whether a layer runs as programs that were written down when it had other modules inside."""
    if not isinstance(layer, ProgramLayerMixin) or layer.actcompress is None:
        return False
    programs = layer.actcompress.programs
    return isinstance(programs, LayerPrograms) and not programs.look.has_all_of(layer)


def _leaf_by_leaf(reason: str) -> Declined:
    return Declined(Role.LAYER, f"{reason}; it runs module by module")
