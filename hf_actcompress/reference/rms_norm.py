"""RMSNorm in the ways in which transformers writes it. The calls of torch and their order are those of the stock
modules and of their autograd graphs, so values and gradients are bit-equal.

A formula says in which dtype the gain is applied (x^ = x / rms(x), in fp32):
  weight_after_cast   Llama, Mistral, Qwen:  weight * x^.to(x.dtype)
  weight_in_fp32      OLMo 2, nn.RMSNorm:    (weight.float() * x^).to(x.dtype)
  one_plus_weight     Gemma:                 (x^ * (1 + weight.float())).to(x.dtype)
  cast_to_weight      T5:                    weight * x^, x^ cast to the weight's dtype if that is 16 bits wide
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tiles import goes_in_tiles, in_tiles

_WIDE = (torch.float32, torch.float64)
RMS_NORM_FORMULAS = ("weight_after_cast", "one_plus_weight", "cast_to_weight", "weight_in_fp32")


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> tuple[Tensor, Tensor]:
    """y like x (dtype as the formula has it), and rstd [..., 1] in fp32; eps None is torch's default."""

    def of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        x32 = _fp32(x)
        added = torch.finfo(x32.dtype).eps if eps is None else eps
        rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + added)
        return _rebuilt(x32, rstd, weight, formula, x.dtype), rstd

    y, rstd = in_tiles(of_rows, x)
    return y, rstd


def rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    """y from x and rstd, bit-equal to y of `rms_norm_fwd`."""
    (y,) = in_tiles(lambda x, rstd: (_rebuilt(_fp32(x), rstd, weight, formula, x.dtype),), x, rstd)
    return y


def _rebuilt(x32: Tensor, rstd: Tensor, weight: Tensor | None, formula: str, dtype: torch.dtype) -> Tensor:
    """y from x in fp32; `dtype` is x's own."""
    normed = x32 * rstd
    if weight is None:
        return _in(normed, dtype)
    if formula == "one_plus_weight":
        return _in(normed * (1.0 + _fp32(weight)), dtype)
    if formula == "weight_in_fp32":
        return _in(_fp32(weight) * normed, dtype)
    return weight * _in(normed, _normed_dtype(dtype, weight, formula))


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    formula: str,
    needed: tuple[bool, bool],
    dresidual: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx like x and dweight [C], from dy [..., C]; None for those not `needed`.

    `dresidual` is x's other gradient, which comes by a residual path; dx is then the sum of both.
    """
    in_fp32 = applies_gain_in_fp32(weight, formula)
    dtype = x.dtype
    cast = dtype if weight is None else _normed_dtype(dtype, weight, formula)
    gain = _gain(weight, formula) if in_fp32 else weight

    def product(dy: Tensor, x: Tensor, rstd: Tensor) -> tuple[Tensor]:
        normed = _fp32(x) * rstd
        return (_fp32(dy) * normed if in_fp32 else dy * _in(normed, cast),)

    def dx(dy: Tensor, x: Tensor, rstd: Tensor) -> tuple[Tensor]:
        dy = _fp32(dy) if in_fp32 else dy
        dnormed = dy if gain is None else dy * gain
        # if the gain's dtype is wider than what it multiplies, autograd rounds here
        direct, through_rstd = _dx(_fp32(dnormed if in_fp32 else _in(dnormed, cast)), _fp32(x), rstd)
        if formula == "cast_to_weight":
            # T5 multiplies x itself and not its fp32 copy, so autograd rounds each term before it adds them
            return (_in(direct, dtype) + _in(through_rstd, dtype),)
        return (_in(direct + through_rstd, dtype),)

    dweight = None
    if needed[1] and weight is not None:
        if needed[0] and not goes_in_tiles(dy, x, rstd):
            # converted once for both gradients
            x = _fp32(x)
        # one sum over all rows, as in autograd
        dweight = _over_rows(in_tiles(product, dy, x, rstd)[0], weight.dtype)
    found = in_tiles(dx, dy, x, rstd)[0] if needed[0] else None
    return found if found is None or dresidual is None else dresidual + found, dweight


def applies_gain_in_fp32(weight: Tensor | None, formula: str) -> bool:
    return weight is None or formula in ("one_plus_weight", "weight_in_fp32")


def _over_rows(products: Tensor, dtype: torch.dtype) -> Tensor:
    return products.reshape(-1, products.size(-1)).sum(0).to(dtype)


def _dx(dnormed: Tensor, x32: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of dx, through x^ = x * rsqrt(mean(x^2) + eps), rounded where autograd rounds.

    Autograd multiplies by -0.5 and by 2. Neither rounds, so both are replaced by one sign.
    """
    drstd = (dnormed * x32).sum(-1, keepdim=True)
    dsquare = drstd * rstd.pow(3) / -x32.size(-1)
    return dnormed * rstd, dsquare * x32


def _gain(weight: Tensor | None, formula: str) -> Tensor | None:
    if weight is None:
        return None
    return 1.0 + _fp32(weight) if formula == "one_plus_weight" else _fp32(weight)


def _normed_dtype(dtype: torch.dtype, weight: Tensor, formula: str) -> torch.dtype:
    if formula == "cast_to_weight":
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return weight.dtype if half else torch.promote_types(dtype, torch.float32)
    return dtype


def _in(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in that dtype. If y has it, y itself is returned: torch 2.11 loses the gradient of an alias while tracing."""
    return y if y.dtype == dtype else y.to(dtype)


def _fp32(x: Tensor) -> Tensor:
    """x in fp32; fp64 stays, so that the oracle and gradcheck have full precision."""
    return x if x.dtype in _WIDE else x.float()
