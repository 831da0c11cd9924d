"""`Role`: what a module is to this package, in patch reports, memory reports, plans and calibrations alike."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of a patched module, of one that is left alone, or of a row of a report.

    Args:
        value: The name that reports show.
        field: The field of a CompressionConfig that names the codec of what such a module keeps; "" if none does.
        group: The group of tensors that a plan decides about as one: "norm", "mlp" or "attention"; "" if none.
    """

    field: str
    group: str

    def __new__(cls, value: str, field: str = "", group: str = "") -> Role:
        role = str.__new__(cls, value)
        role._value_, role.field, role.group = value, field, group
        return role

    NORM = "norm", "norm", "norm"
    ACTIVATION = "activation", "mlp", "mlp"
    GATED_MLP = "gated_mlp", "mlp", "mlp"
    TILED_MLP = "tiled_mlp", "mlp"
    EXPERTS = "experts", "other"
    ATTENTION = "attention", "attention", "attention"
    # the input of attention's output projection, if attention has no record of it, is stored with the codec for linear
    LINEAR = "linear", "linear", "attention"
    CONV2D = "conv2d", "linear"
    # a linear layer's input that passed through a dropout
    DROPOUT = "dropout", "linear"
    CHECKPOINT_INPUT = "checkpoint_input", "checkpoint_input"
    # eager attention and linear attention, which may be computed in parts
    IN_PARTS = "in_parts", "other"
    ADAPTER = "adapter"
    BATCH_NORM = "batch_norm"
    LAYER = "layer"
    # a module outside of layers
    MODULE = "module"
    LOSS_HEAD = "loss_head"
    TOKENS = "tokens"
    # modules that no rule knows
    CONV = "conv"
    FUNCTIONS = "functions"
    # options that apply to a whole model
    CUDA_GRAPH = "cuda_graph"
    PADDING = "padding"
    SHARED_PROMPTS = "shared_prompts"
    # rows of memory reports about tensors that no patched module keeps
    CHECKPOINT = "checkpoint"
    EMBEDDING = "embedding"
    LOSS = "loss"
    OTHER = "other", "other"


# the roles of modules that run by plans
RUN_BY_PLANS = (Role.LAYER, Role.MODULE)
