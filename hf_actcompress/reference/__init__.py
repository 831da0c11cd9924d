"""The specification: every function in plain torch, on any device. Kernels have the same names and signatures."""

from __future__ import annotations

from .activation import ACTIVATIONS, activation_bwd
from .attention import attention_bwd, attention_fwd
from .dropout import dropout_replay, replayed_rng, rng_state
from .gated_mlp import gated_product_bwd
from .layer_norm import layer_norm_bwd, layer_norm_fwd
from .linear import linear_bwd, linear_fwd
from .rms_norm import RMS_NORM_VARIANTS, rms_norm_bwd, rms_norm_fwd, rms_norm_rebuild

__all__ = [
    "ACTIVATIONS",
    "RMS_NORM_VARIANTS",
    "activation_bwd",
    "attention_bwd",
    "attention_fwd",
    "dropout_replay",
    "gated_product_bwd",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_fwd",
    "replayed_rng",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_rebuild",
    "rng_state",
]
