"""RMSNorm in the ways that transformers writes it. The torch calls and their order are those of the stock modules and
of their autograd graph, so that values and gradients are bit-equal.

A variant says in which dtype the gain is applied (x^ = x / rms(x), in fp32):
  weight_after_cast   Llama, Mistral, Qwen:  weight * x^.to(x.dtype)
  weight_in_fp32      OLMo 2, nn.RMSNorm:    (weight.float() * x^).to(x.dtype)
  one_plus_weight     Gemma:                 (x^ * (1 + weight.float())).to(x.dtype)
  cast_to_weight      T5:                    weight * x^, x^ cast to the weight's dtype if that is 16 bits wide
"""

from __future__ import annotations

import torch
from torch import Tensor

RMS_NORM_VARIANTS = ("weight_after_cast", "one_plus_weight", "cast_to_weight", "weight_in_fp32")


def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float | None, variant: str) -> tuple[Tensor, Tensor]:
    """y like x (dtype as the variant has it), and rstd [..., 1] in fp32; eps None is torch's default."""
    x32 = _fp32(x)
    eps = torch.finfo(x32.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return rms_norm_rebuild(x, rstd, weight, variant), rstd


def rms_norm_rebuild(x: Tensor, rstd: Tensor, weight: Tensor | None, variant: str) -> Tensor:
    """y from x and rstd, bit-equal to `rms_norm_fwd`."""
    normed = _fp32(x) * rstd
    if weight is None:
        return _in(normed, x.dtype)
    if variant == "one_plus_weight":
        return _in(normed * (1.0 + _fp32(weight)), x.dtype)
    if variant == "weight_in_fp32":
        return _in(_fp32(weight) * normed, x.dtype)
    return weight * normed.to(_normed_dtype(x, weight, variant))


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: str, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx like x and dweight [C], from dy [..., C]; those not `needed` are None."""
    x32 = _fp32(x)
    normed = x32 * rstd
    in_fp32 = weight is None or variant in ("one_plus_weight", "weight_in_fp32")
    dnormed = dweight = None
    if in_fp32:
        dy, gain = _fp32(dy), _gain(weight, variant)
    else:
        assert weight is not None
        normed_cast, gain = normed.to(_normed_dtype(x, weight, variant)), weight
    if needed[1] and weight is not None:
        product = dy * (normed if in_fp32 else normed_cast)
        dweight = product.reshape(-1, product.size(-1)).sum(0).to(weight.dtype)
    if not needed[0]:
        return None, dweight
    dnormed = dy if gain is None else dy * gain
    # where the gain is wider than what it is applied to, autograd rounds here
    dnormed = _fp32(dnormed if in_fp32 else dnormed.to(normed_cast.dtype))
    direct, through_rstd = _dx(dnormed, x32, rstd)
    if variant == "cast_to_weight":
        # T5 multiplies x itself, not its fp32 copy: autograd rounds each term, then adds
        return direct.to(x.dtype) + through_rstd.to(x.dtype), dweight
    return (direct + through_rstd).to(x.dtype), dweight


def _dx(dnormed: Tensor, x32: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The two terms of dx, through x^ = x * rsqrt(mean(x^2) + eps), op by op as autograd does it."""
    drstd = (dnormed * x32).sum(-1, keepdim=True)
    dvariance = -0.5 * drstd * rstd.pow(3)
    dsquare = dvariance.expand_as(x32) / x32.size(-1)
    return dnormed * rstd, dsquare * (2.0 * x32)


def _gain(weight: Tensor | None, variant: str) -> Tensor | None:
    if weight is None:
        return None
    return 1.0 + _fp32(weight) if variant == "one_plus_weight" else _fp32(weight)


def _normed_dtype(x: Tensor, weight: Tensor, variant: str) -> torch.dtype:
    if variant == "cast_to_weight":
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return weight.dtype if half else torch.promote_types(x.dtype, torch.float32)
    return x.dtype


def _in(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in that dtype, without an alias of it where it has it: torch 2.11 loses the gradient of one that is traced."""
    return y if y.dtype == dtype else y.to(dtype)


def _fp32(x: Tensor) -> Tensor:
    """At least fp32; fp64 stays, so that the oracle and gradcheck see full precision."""
    return x if x.dtype == torch.float64 else x.float()
