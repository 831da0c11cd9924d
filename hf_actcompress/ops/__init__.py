"""WHICH tensors an op keeps: one autograd.Function per (op, variant).

`OPS` in `table.py` is the one table, which also has the ops of `methods/`.
"""

from __future__ import annotations

from ._activation import activation
from ._attention_rows import attention_rows
from ._cast import cast
from ._conv2d import conv2d
from ._deferred_linear import LinearSource, deferred_linear
from ._dropout import dropout
from ._layer_norm import layer_norm
from ._linear import linear
from ._linear_attention import linear_attention
from ._linear_cross_entropy import linear_cross_entropy
from ._returned_logits import returned_logits
from ._rms_norm import rms_norm
from ._rope import rope
from ._tiled import tiled
from .attention import fused_attention, packed_attention, recomputed_attention
from .deferred_logits import DeferredLogits, plain
from .gated_mlp import gated_product
from .heads import tokens_first
from .packed_mask import PackedMask
from .region import Region, region_in_progress
from .snapshot import Snapshot

__all__ = [
    "DeferredLogits",
    "LinearSource",
    "PackedMask",
    "Region",
    "Snapshot",
    "activation",
    "attention_rows",
    "cast",
    "conv2d",
    "deferred_linear",
    "dropout",
    "fused_attention",
    "gated_product",
    "layer_norm",
    "linear",
    "linear_attention",
    "linear_cross_entropy",
    "packed_attention",
    "plain",
    "recomputed_attention",
    "region_in_progress",
    "returned_logits",
    "rms_norm",
    "rope",
    "tiled",
    "tokens_first",
]
