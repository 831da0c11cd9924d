"""Triton kernels and their launchers: tensors in, tensors out; imported lazily and never without need.

`KERNELS` maps the name of a function in `reference/` to the module here that offers the same name and signature.

What may be a kernel. The forward value of a patched module equals stock's bit by bit, so a kernel stands in a forward
only where every step has one correctly rounded result (products, sums of two, casts); where the order of a sum or the
last bit of exp matters, the forward keeps torch's own op. Activations of 16-bit numbers are an exception, because they
have 65,536 inputs: a kernel is in their forward where it was shown, on the user's device, to have stock's bits for all
of them. What only backward sees, a gradient or a rebuilt tensor, may differ from stock's in the last bit: it is held to
stock's own error against fp64, times 1.1. So is the loss head that never has whole logits: its sums go by chunks, in an
order that is not stock's with or without a kernel. Codes are the reference's bits under rounding to nearest, and of the
same distribution under stochastic rounding.

A sum may stand in a forward, too, if it repeats the order of torch's on the device and the device shows the same bits:
RMSNorm's mean of squares, tried at each width when it is met first.

Rotary embeddings keep nothing in stock either: their kernels are there for the passes over memory, one for q and one
for k in place of five to seven, with the reference's bits both ways.

What is none. LayerNorm's forward, which also rebuilds its output: torch has it as one kernel. Dropout's replay: torch's
own kernel under the generator's old state draws the stock mask, whose layout over threads is torch's and changes with
its version. Residual sums and dropout fused into a norm's forward: the sum is kept for backward anyway. In a backward
a norm's kernel does add dx to the gradient that x has beside the norm, where a program hands it that. Packing by size
(entries, tiles, rows): a sort.

What runs where it is faster. Weight gradients out of what a codec kept: a product that decodes, gathers or pools inside
of its tiles has to be faster than a pass that does so and torch's product, and which of the two is depends on the shape
and the device. `auto` runs both on the user's device when a shape is met first (`timing.py`), and the faster one from
then on. `recipes/benchmark_kernels.py --roofline` says where the kernels can win at all, `--timed` where they do.
"""

from __future__ import annotations

from functools import cache

import torch

KERNELS: dict[str, str] = {
    "activation_bwd": "activation",
    "activation_derivative": "activation",
    "activation_fwd": "activation_forward",
    "activation_output_bits": "methods.inverted",
    "activation_output_bwd": "methods.inverted",
    "activation_value": "activation",
    "block_sparse_grad_weight": "methods.block_sparse",
    "fewbit_bwd": "methods.fewbit",
    "fewbit_codes": "methods.fewbit",
    "float8_grad_weight": "grad_weight",
    "float8_pack": "float8",
    "float8_unpack": "float8",
    "gated_product": "gated_mlp",
    "gated_product_and_bwd": "gated_mlp",
    "gated_product_bwd": "gated_mlp",
    "gated_product_fwd": "activation_forward",
    "int_group_grad_weight": "grad_weight",
    "int_group_pack": "int_group",
    "int_group_unpack": "int_group",
    "layer_norm_bwd": "layer_norm",
    "layer_norm_output_bwd": "methods.norm_output",
    "linear_cross_entropy_bwd": "linear_cross_entropy",
    "linear_cross_entropy_fwd": "linear_cross_entropy",
    "pooled_grad_weight": "methods.pooled",
    "rms_norm_bwd": "rms_norm",
    "rms_norm_fwd": "rms_norm",
    "rms_norm_output_bwd": "methods.norm_output",
    "rms_norm_rebuild": "rms_norm",
    "rope_bwd": "rope",
    "rope_fwd": "rope",
    "row_sample_grad_weight": "methods.row_sample",
    "topk_grad_weight": "methods.topk",
    "topk_unpack": "methods.topk",
}

# the kinds for which torch has one kernel of its own: as fast, and bit-equal to stock
_TORCH_ACTIVATIONS = frozenset(
    {
        "gelu",
        "gelu_tanh",
        "silu",
        "mish",
        "relu",
        "relu6",
        "leaky_relu",
        "hardswish",
        "hardsigmoid",
        "elu",
        "selu",
        "softplus",
        "sigmoid",
        "tanh",
    }  # fmt: skip
)
# the compositions of which no kernel has stock's bits, because nobody wrote one
_COMPOSED = frozenset({"gelu_clipped", "gelu_erf", "laplace", "relu_squared", "softsign", "sqrt_softplus"})
TORCH_HAS: dict[str, frozenset[str]] = {
    "activation_bwd": _TORCH_ACTIVATIONS,
    "activation_fwd": _TORCH_ACTIVATIONS | _COMPOSED,
    "activation_value": _TORCH_ACTIVATIONS,
    # here torch has two, of which the product's reads again what the activation's wrote
    "gated_product_fwd": (_TORCH_ACTIVATIONS | _COMPOSED) - {"gelu", "gelu_tanh", "silu"},
}

# those that stand in a forward, and a backward that has the same steps
BITWISE = frozenset({"activation_fwd", "gated_product_fwd", "rms_norm_fwd", "rms_norm_rebuild", "rope_bwd", "rope_fwd"})

# each result is made of its own element, row of q and k, or group: these may run on what nobody has tuned a kernel for
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

# those that are no operators in a traced graph, where a compiler fuses stock's ops
EAGER = frozenset({"activation_fwd", "gated_product_fwd"})

# name -> what `auto` times it against
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
    """Whether it is an NVIDIA GPU without instructions for bf16: there kernels take fp16 and fp32."""
    nvidia = device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available()
    return nvidia and torch.cuda.get_device_capability(device) < (8, 0)
