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
from .linear_cross_entropy import cross_entropy_fwd, linear_cross_entropy_bwd, linear_cross_entropy_fwd
from .methods.attention_tempo import attention_tempo_bwd, attention_tempo_fwd
from .methods.block_sparse import block_sparse_grad_weight, block_sparse_pack, block_sparse_unpack
from .methods.derivative import activation_derivative
from .methods.fewbit import FEWBIT_METHODS, TABLE_OPTIONS, TWO_VALUED, fewbit_bwd, fewbit_codes, fewbit_stored_bits
from .methods.int_ranked import int_ranked_pack, int_ranked_unpack
from .methods.int_running import int_running_pack, int_running_unpack
from .methods.inverted import INVERTED, activation_output_bits, activation_output_bwd
from .methods.norm_output import (
    layer_norm_output_bwd,
    layer_norm_output_reasons,
    rms_norm_output_bwd,
    rms_norm_output_reasons,
)
from .methods.pooled import (
    pooled_grad_weight,
    pooled_image_pack,
    pooled_image_unpack,
    pooled_pack,
    pooled_real_pack,
    pooled_unpack,
)
from .methods.row_sample import row_sample_grad_weight, row_sample_pack, row_sample_unpack
from .methods.topk import topk_grad_weight, topk_pack, topk_unpack
from .packed_attention import packed_attention_bwd, packed_attention_fwd
from .packed_kernels import packed_kernel
from .rms_norm import RMS_NORM_FORMULAS, rms_norm_bwd, rms_norm_fwd, rms_norm_rebuild
from .rng import seed_codecs
from .rope import rope_bwd, rope_fwd

__all__ = [
    "ACTIVATIONS",
    "FEWBIT_METHODS",
    "INVERTED",
    "RMS_NORM_FORMULAS",
    "TABLE_OPTIONS",
    "TWO_VALUED",
    "ConvGeometry",
    "activation_bwd",
    "activation_derivative",
    "activation_fwd",
    "activation_output_bits",
    "activation_output_bwd",
    "activation_value",
    "attention_bwd",
    "attention_fwd",
    "attention_tempo_bwd",
    "attention_tempo_fwd",
    "block_sparse_grad_weight",
    "block_sparse_pack",
    "block_sparse_unpack",
    "conv2d_bwd",
    "conv2d_fwd",
    "cross_entropy_fwd",
    "draws_like_any",
    "dropout_fwd",
    "dropout_replay",
    "fewbit_bwd",
    "fewbit_codes",
    "fewbit_stored_bits",
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
    "int_ranked_pack",
    "int_ranked_unpack",
    "int_running_pack",
    "int_running_unpack",
    "layer_norm_bwd",
    "layer_norm_fwd",
    "layer_norm_output_bwd",
    "layer_norm_output_reasons",
    "linear_bwd",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_fwd",
    "packed_attention_bwd",
    "packed_attention_fwd",
    "packed_kernel",
    "packed_sdpa",
    "pooled_grad_weight",
    "pooled_image_pack",
    "pooled_image_unpack",
    "pooled_pack",
    "pooled_real_pack",
    "pooled_unpack",
    "replayed_rng",
    "rms_norm_bwd",
    "rms_norm_fwd",
    "rms_norm_output_bwd",
    "rms_norm_output_reasons",
    "rms_norm_rebuild",
    "rng_state",
    "rope_bwd",
    "rope_fwd",
    "row_sample_grad_weight",
    "row_sample_pack",
    "row_sample_unpack",
    "seed_codecs",
    "topk_grad_weight",
    "topk_pack",
    "topk_unpack",
]
