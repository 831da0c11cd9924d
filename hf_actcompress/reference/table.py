"""Every function of the specification by name, those of the published methods included.

The package itself imports no method, because the references of the methods import files of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from .. import reference
from ..methods.actnn.reference import int_ranked_pack, int_ranked_unpack
from ..methods.block_sparse.reference import block_sparse_grad_weight, block_sparse_pack, block_sparse_unpack
from ..methods.derivative.reference import activation_derivative
from ..methods.fewbit.reference import fewbit_bwd, fewbit_codes
from ..methods.inverted.reference import activation_output_bits, activation_output_bwd
from ..methods.mesa.reference import int_running_pack, int_running_unpack
from ..methods.norm_output.reference import layer_norm_output_bwd, rms_norm_output_bwd
from ..methods.pooled.reference import (
    pooled_grad_weight,
    pooled_image_pack,
    pooled_image_unpack,
    pooled_pack,
    pooled_real_pack,
    pooled_unpack,
)
from ..methods.row_sample.reference import row_sample_grad_weight, row_sample_pack, row_sample_unpack
from ..methods.tempo.reference import attention_tempo_bwd, attention_tempo_fwd
from ..methods.topk.reference import topk_grad_weight, topk_pack, topk_unpack

_OF_METHODS = (
    activation_derivative,
    activation_output_bits,
    activation_output_bwd,
    attention_tempo_bwd,
    attention_tempo_fwd,
    block_sparse_grad_weight,
    block_sparse_pack,
    block_sparse_unpack,
    fewbit_bwd,
    fewbit_codes,
    int_ranked_pack,
    int_ranked_unpack,
    int_running_pack,
    int_running_unpack,
    layer_norm_output_bwd,
    pooled_grad_weight,
    pooled_image_pack,
    pooled_image_unpack,
    pooled_pack,
    pooled_real_pack,
    pooled_unpack,
    rms_norm_output_bwd,
    row_sample_grad_weight,
    row_sample_pack,
    row_sample_unpack,
    topk_grad_weight,
    topk_pack,
    topk_unpack,
)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(reference).items() if isinstance(value, FunctionType)
} | {function.__name__: function for function in _OF_METHODS}
