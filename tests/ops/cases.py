"""One builder of cases per row of `OPS`. A case has our op and the stock composition that it must equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_actcompress import ops
from hf_actcompress.reference import RMS_NORM_FORMULAS
from tests.ops.attention_cases import (
    attention_rows_cases,
    fused_attention_cases,
    packed_attention_cases,
    recomputed_attention_cases,
)
from tests.ops.contract_case import RNG_STATE, Case, Inputs, rand, rows, seeded, size, statistic


def conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """transformers' Conv1D."""
    y = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return y.view(*x.shape[:-1], weight.size(1))


def linear_cases() -> list[Case]:
    def inputs(batch: int, dtype: torch.dtype, transposed: bool = False, bias: bool = True) -> Inputs:
        weight = rand(7, 5, dtype=dtype) if transposed else rand(5, 7, dtype=dtype)
        return [rand(batch, 3, 7, dtype=dtype), weight, rand(5, dtype=dtype) if bias else None]

    def kept(x: Inputs) -> int:
        return size(x[0])

    return [
        Case("linear", ops.linear, functional.linear, inputs, 1, kept, weight_only=1),
        Case("linear_no_bias", ops.linear, functional.linear, partial(inputs, bias=False), 1, kept, weight_only=1),
        Case(
            "conv1d", partial(ops.linear, transposed=True), conv1d, partial(inputs, transposed=True), 1, kept,
            strided=False, weight_only=1,
        ),
    ]  # fmt: skip


def conv2d_cases() -> list[Case]:
    def inputs(batch: int, dtype: torch.dtype, groups: int = 1, bias: bool = True) -> Inputs:
        weight = rand(6, 4 // groups, 3, 3, dtype=dtype)
        return [rand(batch, 4, 7, 5, dtype=dtype), weight, rand(6, dtype=dtype) if bias else None]

    def case(name: str, *geometry: tuple[int, int], groups: int = 1, bias: bool = True) -> Case:
        return Case(
            name,
            partial(ops.conv2d, geometry=(*geometry, groups)),
            lambda x, weight, bias: functional.conv2d(x, weight, bias, *geometry, groups),
            partial(inputs, groups=groups, bias=bias),
            1,
            lambda x: size(x[0]),
            weight_only=1,
        )

    return [
        case("conv2d", (1, 1), (1, 1), (1, 1)),
        case("conv2d_strided_grouped", (2, 1), (0, 2), (1, 2), groups=2, bias=False),
    ]


def activation_cases() -> list[Case]:
    stocks = {
        "gelu": functional.gelu,
        "gelu_tanh": partial(functional.gelu, approximate="tanh"),
        "silu": functional.silu,
        "mish": functional.mish,
    }
    return [
        Case(
            kind,
            partial(ops.activation, stock=stock, kind=kind),
            stock,
            lambda batch, dtype: [rand(batch, 3, 8, dtype=dtype)],
            1,
            lambda x: size(x[0]),
        )
        for kind, stock in stocks.items()
    ]


def gated_cases() -> list[Case]:
    cases = []
    stocks = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
    for kind, stock in stocks.items():
        cases.append(
            Case(
                f"gated_{kind}",
                partial(ops.gated_product, stock=stock, kind=kind),
                lambda gate, up, stock=stock: stock(gate) * up,
                lambda batch, dtype: [rand(batch, 3, 8, dtype=dtype), rand(batch, 3, 8, dtype=dtype)],
                2,
                lambda x: size(x[0], x[1]),
            )
        )
    return cases


def layer_norm_cases() -> list[Case]:
    def inputs(batch: int, dtype: torch.dtype, weight: bool, bias: bool) -> Inputs:
        affine = [rand(9, dtype=dtype) if wanted else None for wanted in (weight, bias)]
        return [rand(batch, 4, 9, dtype=dtype), *affine]

    def stock(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return functional.layer_norm(x, (9,), weight, bias, 1e-5)

    def ours(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return ops.layer_norm(x, (9,), weight, bias, 1e-5)

    def kept(x: Inputs) -> int:
        # mean and rstd have x's dtype on a CPU
        return size(x[0]) + 2 * rows(x[0]) * x[0].element_size()

    return [
        Case(f"layer_norm_{name}", ours, stock, partial(inputs, weight=weight, bias=bias), 1, kept)
        for name, weight, bias in (("affine", True, True), ("weight", True, False), ("plain", False, False))
    ]


def rms_norm_stock(x: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    """The forward that transformers' modules of that formula have."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    x32 = x.to(dtype)
    # T5 multiplies x itself, the others its fp32 copy
    normed = (x if formula == "cast_to_weight" else x32) * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)
    if weight is None:
        return normed.to(x.dtype)
    if formula == "one_plus_weight":
        return (normed * (1.0 + weight.to(dtype))).to(x.dtype)
    if formula == "weight_in_fp32":
        return (weight.to(dtype) * normed).to(x.dtype)
    if formula == "cast_to_weight":
        return weight * (normed.to(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else normed)
    return weight * normed.to(x.dtype)


def rms_norm_cases() -> list[Case]:
    cases = []
    for formula in RMS_NORM_FORMULAS:
        for has_weight in (True, False):
            cases.append(
                Case(
                    f"rms_norm_{formula}{'' if has_weight else '_plain'}",
                    partial(ops.rms_norm, eps=1e-6, formula=formula),
                    partial(rms_norm_stock, formula=formula),
                    lambda batch, dtype, has_weight=has_weight: [
                        rand(batch, 4, 9, dtype=dtype),
                        rand(9, dtype=dtype) if has_weight else None,
                    ],
                    1,
                    lambda x: size(x[0]) + rows(x[0]) * statistic(x[0]),
                    # in fp32 the autograd engine decides in which order stock adds the two terms of dx
                    bits=(torch.bfloat16,),
                )
            )
    return cases


def dropout_cases() -> list[Case]:
    return [
        Case(
            f"dropout_{p}",
            seeded(partial(ops.dropout, p=p)),
            seeded(partial(functional.dropout, p=p)),
            lambda batch, dtype: [rand(batch, 3, 8, dtype=dtype)],
            1,
            # the mask is kept, because it is smaller than the generator's state; for p = 1, where nothing is drawn, the
            # state is kept
            lambda x, p=p: RNG_STATE if p == 1 else x[0].numel(),
            strided=False,
        )
        for p in (0.1, 0.5, 1.0)
    ]


def cast_cases() -> list[Case]:
    return [
        Case(
            f"cast_{str(dtype).removeprefix('torch.')}",
            partial(ops.cast, dtype=dtype),
            partial(Tensor.to, dtype=dtype),
            lambda batch, dtype: [rand(batch, 3, 8, dtype=dtype)],
            1,
            lambda x: 0,
            # gradcheck needs finite differences, which are meaningless for a function that rounds
            gradcheck=False,
        )
        for dtype in (torch.float16, torch.float64)
    ]


def rope_stock(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
    """Both results of Llama's own function, in one tensor."""
    return torch.cat(apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim), dim=unsqueeze_dim)


def rope_ours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
    return torch.cat(ops.rope(q, k, cos, sin, unsqueeze_dim), dim=unsqueeze_dim)


def rope_cases() -> list[Case]:
    def inputs(batch: int, dtype: torch.dtype, dim: int, angles: torch.dtype | None, shared: bool, d: int) -> Inputs:
        sizes = [(batch, h, 3, d) if dim == 1 else (batch, 3, h, d) for h in (4, 2)]
        of_each = [rand(1 if shared else batch, 3, d, dtype=angles or dtype, grad=False) for _ in range(2)]
        return [*(rand(*sizes, dtype=dtype) for sizes in sizes), of_each[0], of_each[1].flip(-1)]

    def case(name: str, dim: int, angles: torch.dtype | None = None, shared: bool = False, d: int = 6) -> Case:
        make = partial(inputs, dim=dim, angles=angles, shared=shared, d=d)
        functions = (partial(function, unsqueeze_dim=dim) for function in (rope_ours, rope_stock))
        return Case(f"rope_{name}", *functions, make, 2, lambda x: 0)

    return [
        case("heads_first", 1, shared=True),
        case("tokens_first", 2),
        case("wide_angles", 1, angles=torch.float32),
        case("odd_width", 1, d=5),
    ]


BUILDERS: dict[tuple[str, str], Callable[[], list[Case]]] = {
    ("linear", "record"): linear_cases,
    ("conv2d", "record"): conv2d_cases,
    ("activation", "input"): activation_cases,
    ("gated_mlp", "gate_up"): gated_cases,
    ("layer_norm", "input"): layer_norm_cases,
    ("rms_norm", "input"): rms_norm_cases,
    ("dropout", "rng"): dropout_cases,
    ("attention", "fused"): fused_attention_cases,
    ("attention", "packed"): packed_attention_cases,
    ("attention", "recomputed"): recomputed_attention_cases,
    ("attention", "rows"): attention_rows_cases,
    ("rope", "angles"): rope_cases,
    ("cast", "record"): cast_cases,
}

# rows whose contract does not fit this form, and the file that has it
ELSEWHERE = {
    ("tiled_mlp", "input"): "../models/test_tiled_mlps.py",
    ("linear_attention", "segments"): "../models/test_linear_attention.py",
    ("linear_cross_entropy", "vocabulary_chunks"): "test_linear_cross_entropy.py",
    ("activation", "output"): "test_variants_contract.py",
    ("activation", "fewbit"): "test_variants_contract.py",
    ("activation", "derivative"): "test_variants_contract.py",
    ("layer_norm", "output"): "test_variants_contract.py",
    ("rms_norm", "output"): "test_variants_contract.py",
    ("attention", "tempo"): "test_variants_contract.py",
}

CASES = [case for build in BUILDERS.values() for case in build()]
