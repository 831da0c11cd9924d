"""The specification: every function in plain torch, on any device. Kernels have the same names and signatures."""

from __future__ import annotations

from ._packed_sdpa import packed_sdpa
from .activation import ACTIVATIONS, activation_bwd, activation_value
from .activation_forward import activation_fwd, gated_product_fwd
from .attention import attention_bwd, attention_fwd
from .conv2d import ConvGeometry, conv2d_bwd, conv2d_fwd
from .dropout import draws_like_any, dropout_fwd, dropout_replay, replayed_rng, rng_state
from .float8 import float8_grad_weight, float8_pack, float8_unpack
from .gated_mlp import gated_product, gated_product_and_bwd, gated_product_bwd
from .int_group import int_group_grad_weight, int_group_pack, int_group_unpack
from .layer_norm import layer_norm_bwd, layer_norm_fwd
from .linear import linear_bwd, linear_fwd
from .linear_cross_entropy import linear_cross_entropy_bwd, linear_cross_entropy_fwd
from .packed_attention import packed_attention_bwd, packed_attention_fwd
from .packed_kernels import packed_kernel
from .rms_norm import RMS_NORM_FORMULAS, rms_norm_bwd, rms_norm_fwd, rms_norm_rebuild
from .rng import seed_codecs
from .rope import rope_bwd, rope_fwd

__all__ = [
    "ACTIVATIONS",
    "RMS_NORM_FORMULAS",
    "ConvGeometry",
    "activation_bwd",
    "activation_fwd",
    "activation_value",
    "attention_bwd",
    "attention_fwd",
    "conv2d_bwd",
    "conv2d_fwd",
    "draws_like_any",
    "dropout_fwd",
    "dropout_replay",
    "float8_grad_weight",
    "float8_pack",
    "float8_unpack",
    "gated_product",
    "gated_product_and_bwd",
    "gated_product_bwd",
    "gated_product_fwd",
    "int_group_grad_weight",
    "int_group_pack",
    "int_group_unpack",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_fwd",
    "packed_attention_bwd",
    "packed_attention_fwd",
    "packed_kernel",
    "packed_sdpa",
    "replayed_rng",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_rebuild",
    "rng_state",
    "rope_bwd",
    "rope_fwd",
    "seed_codecs",
]
