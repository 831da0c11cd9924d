"""WHICH tensors an op keeps: one autograd.Function per (op, variant).

`OPS` is the one table: a new op or variant is a file here and a row there; the contract tests, the README table and
the benchmark iterate the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .activation import activation
from .attention import fused_attention, recomputed_attention
from .cast import cast
from .deferred_linear import DeferredLogits, deferred_linear, plain
from .dropout import dropout
from .gated_mlp import gated_product
from .layer_norm import layer_norm
from .linear import linear
from .linear_cross_entropy import linear_cross_entropy
from .rms_norm import rms_norm

__all__ = [
    "OPS",
    "DeferredLogits",
    "Op",
    "activation",
    "cast",
    "deferred_linear",
    "dropout",
    "fused_attention",
    "gated_product",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "plain",
    "recomputed_attention",
    "rms_norm",
]


@dataclass(frozen=True)
class Op:
    """One row of the table: what an op keeps between forward and backward, in words for the README."""

    name: str
    variant: str
    function: Callable[..., Any]
    keeps: str
    rebuilds: str
    gradient: str = "exact"


OPS: tuple[Op, ...] = (
    Op("linear", "record", linear, "its input's record (nothing if the weight is frozen)", "autocast casts"),
    Op("activation", "input", activation, "its input", "its output"),
    Op("gated_mlp", "gate_up", gated_product, "gate and up", "act(gate) and the product"),
    Op("layer_norm", "input", layer_norm, "its input, mean, rstd", "its output"),
    Op("rms_norm", "input", rms_norm, "its input, rstd", "its output, the fp32 copies"),
    Op("dropout", "rng", dropout, "the generator's state", "mask and output"),
    Op("attention", "fused", fused_attention, "q, k, v, output, logsumexp, the mask once", "repeated k and v"),
    Op("attention", "recomputed", recomputed_attention, "q, k, v, the mask once, RNG state", "probabilities"),
    Op("cast", "record", cast, "nothing", "its output"),
    Op(
        "linear_cross_entropy",
        "vocabulary_chunks",
        linear_cross_entropy,
        "the hidden states' record, the targets, two statistics per row",
        "the logits, a chunk at a time",
    ),
)
