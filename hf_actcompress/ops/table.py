"""The ops and their variants. A new one is a file beside this one and a row here.

The contract tests, the table in this folder's README.md and the benchmark iterate the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import ops
from ..methods.derivative.op import activation_derivative
from ..methods.fewbit.op import activation_fewbit
from ..methods.inverted.op import activation_output
from ..methods.norm_output.op import layer_norm_output, rms_norm_output
from ..methods.tempo.op import attention_tempo


@dataclass(frozen=True)
class Op:
    """One row of the table: what an op keeps between forward and backward, in words for README.md."""

    name: str
    variant: str
    function: Callable[..., Any]
    keeps: str
    rebuilds: str
    gradient: str = "exact"


OPS: tuple[Op, ...] = (
    Op("linear", "record", ops.linear, "its input's record (nothing if the weight is frozen)", "autocast casts"),
    Op("conv2d", "record", ops.conv2d, "its input's record (nothing if the weight is frozen)", "autocast casts"),
    Op("activation", "input", ops.activation, "its input", "its output"),
    Op("gated_mlp", "gate_up", ops.gated_product, "gate and up", "act(gate) and the product"),
    Op("tiled_mlp", "input", ops.tiled, "its input's record", "all inside of an MLP, a tile of rows at a time"),
    Op("layer_norm", "input", ops.layer_norm, "its input, mean, rstd", "its output"),
    Op("rms_norm", "input", ops.rms_norm, "its input, rstd", "its output, the fp32 copies"),
    Op(
        "dropout",
        "rng",
        ops.dropout,
        "the generator's state; the mask (bool) where a CPU's state is more bytes",
        "mask and output",
    ),
    Op("attention", "fused", ops.fused_attention, "q, k, v, output, logsumexp, the mask once", "repeated k and v"),
    Op(
        "attention",
        "recomputed",
        ops.recomputed_attention,
        "q, k, v, the mask once, the RNG state if it draws",
        "probabilities",
    ),
    Op("attention", "packed", ops.packed_attention, "q, k, v, output, logsumexp", "repeated k and v"),
    Op("attention", "rows", ops.attention_rows, "q, k, v", "mask, scores, probabilities, some rows at a time"),
    Op("linear_attention", "segments", ops.linear_attention, "its inputs", "all inside of a segment"),
    Op("rope", "angles", ops.rope, "cos and sin, which all layers share", "nothing"),
    Op("cast", "record", ops.cast, "nothing", "its output"),
    Op(
        "linear_cross_entropy",
        "vocabulary_chunks",
        ops.linear_cross_entropy,
        "the hidden states' record and small logits; of a frozen head the gradient",
        "the logits, a chunk at a time",
    ),
    Op(
        "activation", "output", activation_output, "its output, one bit per element", "f' from the output", "f' to 2e-5"
    ),
    Op(
        "activation",
        "fewbit",
        activation_fewbit,
        "f' in 1 to 8 bits",
        "nothing",
        "approximate: f' to 0.2% (8 bits) .. 32%",
    ),
    Op("activation", "derivative", activation_derivative, "f'", "nothing", "exact but for one rounding of f'"),
    Op("layer_norm", "output", layer_norm_output, "its output, rstd", "x^", "exact but for the rounding of the output"),
    Op("rms_norm", "output", rms_norm_output, "its output, rstd", "x^", "exact but for the rounding of the output"),
    Op(
        "attention",
        "tempo",
        attention_tempo,
        "q, k, v, the probabilities once, RNG state",
        "mask, dropped probabilities",
    ),
)
