"""Triton kernels and their launchers: functions of tensors, which are imported only when they are used.

`KERNELS` maps the name of a function in `reference/` (or in the `reference.py` of a published method) to the module of
the package that has a kernel of the same name and signature.

What may be a kernel. The forward value of a patched module equals stock's bit by bit. So a forward may only use a
kernel if every step of it has one correctly rounded result (products, sums of two numbers, casts). Where the order of a
sum or the last bit of exp matters, the forward keeps torch's own op. There are two exceptions, and both are tried on
the user's device first. Activations of 16-bit numbers have only 65,536 inputs: the kernel is used if it has stock's
bits for all of them. RMSNorm's mean of squares is summed in the order of torch's own kernel: it is used for a width if
it has the same bits there.

What only backward sees, a gradient or a rebuilt tensor, may differ from stock's in the last bit. Its error against fp64
is at most 1.1 times stock's. The same holds for the loss head that never has whole logits: it sums by chunks, in
another order than stock, with or without a kernel. Codes have the reference's bits under rounding to nearest, and the
same distribution under stochastic rounding.

Rotary embeddings keep nothing in stock either. Their kernels save passes over memory: one for q and one for k instead
of five to seven. They have the reference's bits in both directions.

What has no kernel. LayerNorm's forward, which also rebuilds its output, is one kernel in torch already. Dropout is
replayed by torch's own kernel under the generator's old state, because the layout of stock's mask over threads belongs
to torch and changes with its version. Residual sums and dropout are not fused into a norm's forward, because the sum is
kept for backward anyway. A norm's backward kernel does add dx to the other gradient of x if a program passes it that
gradient. Packing the largest entries, tiles or rows is a sort.

What runs only where it is faster. The weight gradient from what a codec kept is a product that decodes, gathers or
pools within its tiles. It has to be faster than a separate decoding pass and torch's product, which depends on shape
and device. `auto` runs both on the user's device when it first meets a shape (`timing.py`), and uses the faster one
from then on. `recipes/benchmark_kernels.py --roofline` shows where the kernels can be faster at all, `--timed` where
they are.
"""

from __future__ import annotations

from functools import cache

import torch

from ..reference.activation import ACTIVATIONS

KERNELS: dict[str, str] = {
    "activation_bwd": "kernels.activation",
    "activation_derivative": "kernels.activation",
    "activation_fwd": "kernels.activation_forward",
    "activation_output_bits": "methods.inverted.kernel",
    "activation_output_bwd": "methods.inverted.kernel",
    "activation_value": "kernels.activation",
    "block_sparse_grad_weight": "methods.block_sparse.kernel",
    "fewbit_bwd": "methods.fewbit.kernel",
    "fewbit_codes": "methods.fewbit.kernel",
    "float8_grad_weight": "kernels.grad_weight",
    "float8_pack": "kernels.float8",
    "float8_unpack": "kernels.float8",
    "gated_product": "kernels.gated_mlp",
    "gated_product_and_bwd": "kernels.gated_mlp",
    "gated_product_bwd": "kernels.gated_mlp",
    "gated_product_fwd": "kernels.activation_forward",
    "int_group_grad_weight": "kernels.grad_weight",
    "int_group_pack": "kernels.int_group",
    "int_group_unpack": "kernels.int_group",
    "layer_norm_bwd": "kernels.layer_norm",
    "layer_norm_output_bwd": "methods.norm_output.kernel",
    "linear_cross_entropy_bwd": "kernels.linear_cross_entropy",
    "linear_cross_entropy_fwd": "kernels.linear_cross_entropy",
    "pooled_grad_weight": "methods.pooled.kernel",
    "rms_norm_bwd": "kernels.rms_norm",
    "rms_norm_fwd": "kernels.rms_norm",
    "rms_norm_output_bwd": "methods.norm_output.kernel",
    "rms_norm_rebuild": "kernels.rms_norm",
    "rope_bwd": "kernels.rope",
    "rope_fwd": "kernels.rope",
    "row_sample_grad_weight": "methods.row_sample.kernel",
    "topk_grad_weight": "methods.topk.kernel",
    "topk_unpack": "methods.topk.kernel",
}

# kinds that stock composes of several ops and for which no bit-equal kernel has been written
_COMPOSED = frozenset({"gelu_clipped", "gelu_erf", "laplace", "relu_squared", "softsign", "sqrt_softplus"})
# kinds for which torch has one kernel of its own, which is as fast and bit-equal to stock
_TORCH_ACTIVATIONS = frozenset(ACTIVATIONS) - _COMPOSED - {"gelu_new", "quick_gelu"}
TORCH_HAS: dict[str, frozenset[str | None]] = {
    "activation_bwd": _TORCH_ACTIVATIONS,
    "activation_fwd": _TORCH_ACTIVATIONS | _COMPOSED,
    "activation_value": _TORCH_ACTIVATIONS,
    # ours takes five launches more, for sums over its programs and casts
    "layer_norm_bwd": frozenset({None}),
    # torch launches two kernels here: the product's kernel reads what the activation's has written
    "gated_product_fwd": (_TORCH_ACTIVATIONS | _COMPOSED) - {"gelu", "gelu_tanh", "silu"},
}

# kernels that must have the reference's bits: those used in a forward, and a backward with the same steps
BITWISE = frozenset({"activation_fwd", "gated_product_fwd", "rms_norm_fwd", "rms_norm_rebuild", "rope_bwd", "rope_fwd"})

# each result depends on its own element, row of q and k, or group only: these may run on devices they are not tuned for
POINTWISE = frozenset(
    {
        "activation_bwd",
        "activation_derivative",
        "activation_output_bits",
        "activation_output_bwd",
        "activation_value",
        "fewbit_bwd",
        "fewbit_codes",
        "float8_pack",
        "float8_unpack",
        "gated_product",
        "gated_product_bwd",
        "int_group_pack",
        "int_group_unpack",
        "rope_bwd",
        "rope_fwd",
    }
)

# name -> what `auto` compares its time with
_PRODUCT = "a pass over the codes and torch's product"
TIMED: dict[str, str] = {
    "block_sparse_grad_weight": "torch's products of gathered tiles",
    "float8_grad_weight": _PRODUCT,
    "int_group_grad_weight": _PRODUCT,
    "pooled_grad_weight": "a pass over dy and torch's product",
    "row_sample_grad_weight": "a copy of dy's rows and torch's product",
}


@cache
def lacks_bf16(device: torch.device) -> bool:
    """Whether the device is an NVIDIA GPU without instructions for bf16; kernels take fp16 and fp32 there."""
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device) < (8, 0)
