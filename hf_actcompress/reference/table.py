"""Every function of the specification by name, those of the published methods included.

The package itself imports no method, because the references of the methods import files of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from .. import reference
from ..methods.actnn import reference as actnn
from ..methods.block_sparse import reference as block_sparse
from ..methods.derivative import reference as derivative
from ..methods.fewbit import reference as fewbit
from ..methods.inverted import reference as inverted
from ..methods.mesa import reference as mesa
from ..methods.norm_output import reference as norm_output
from ..methods.pooled import reference as pooled
from ..methods.row_sample import reference as row_sample
from ..methods.tempo import reference as tempo
from ..methods.topk import reference as topk

_OF_METHODS = (
    derivative.activation_derivative,
    inverted.activation_output_bits,
    inverted.activation_output_bwd,
    tempo.attention_tempo_bwd,
    tempo.attention_tempo_fwd,
    block_sparse.block_sparse_grad_weight,
    block_sparse.block_sparse_pack,
    block_sparse.block_sparse_unpack,
    fewbit.fewbit_bwd,
    fewbit.fewbit_codes,
    actnn.int_ranked_pack,
    actnn.int_ranked_unpack,
    mesa.int_running_pack,
    mesa.int_running_unpack,
    norm_output.layer_norm_output_bwd,
    pooled.pooled_grad_weight,
    pooled.pooled_image_pack,
    pooled.pooled_image_unpack,
    pooled.pooled_pack,
    pooled.pooled_real_pack,
    pooled.pooled_unpack,
    norm_output.rms_norm_output_bwd,
    row_sample.row_sample_grad_weight,
    row_sample.row_sample_pack,
    row_sample.row_sample_unpack,
    topk.topk_grad_weight,
    topk.topk_pack,
    topk.topk_unpack,
)

FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: value for name, value in vars(reference).items() if isinstance(value, FunctionType)
} | {function.__name__: function for function in _OF_METHODS}
