"""LayerNorm and RMSNorm backward from the output: x^ = (y - bias) / weight, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

_Shape = tuple[int, ...]

# a rounding error of y is |x^ + bias / weight| times as large in x^
LARGEST_RATIO = 10.0
SMALLEST_GAIN = 1e-3


def layer_norm_output_reasons(weight: Tensor | None, bias: Tensor | None) -> list[str]:
    """Why a LayerNorm with these parameters should keep its input instead of its output; empty if there is no reason.

    One bad channel is enough: the gradient of its weight would be wrong, and with it dx of every row.
    """
    reasons = _gain_reasons(weight)
    if weight is not None and bias is not None:
        ratio = bias.detach().abs() / weight.detach().abs()
        count = int((ratio > LARGEST_RATIO).sum())
        if count:
            reasons.append(
                f"{count} of {weight.numel()} channels have |bias / weight| > {LARGEST_RATIO:g} "
                f"(largest {ratio.max().item():.3g})"
            )
    return reasons


def rms_norm_output_reasons(weight: Tensor | None, formula: str) -> list[str]:
    """The same for an RMSNorm; `formula` is a row of `RMS_NORM_FORMULAS`."""
    if weight is not None and formula == "one_plus_weight":
        weight = 1.0 + weight.detach()
    return _gain_reasons(weight)


def _gain_reasons(weight: Tensor | None) -> list[str]:
    if weight is None:
        return []
    count = int((weight.detach().abs() < SMALLEST_GAIN).sum())
    return [f"{count} of {weight.numel()} channels have |weight| < {SMALLEST_GAIN:g}"] if count else []


def layer_norm_output_bwd(
    dy: Tensor,
    y: Tensor,
    shape: _Shape,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx like y, dweight, dbias; None for those not `needed`. y [..., *shape]; rstd has one value per row."""
    dims = tuple(range(-len(shape), 0))
    rows = tuple(range(y.dim() - len(shape)))
    dy32 = _wide(dy)
    normed = _normed(_wide(y) if bias is None else _wide(y) - _wide(bias), None if weight is None else _wide(weight))
    dx = dweight = dbias = None
    if needed[1] and weight is not None:
        dweight = (dy32 * normed).sum(rows).to(weight.dtype) if rows else (dy32 * normed).to(weight.dtype)
    if needed[2] and bias is not None:
        dbias = dy32.sum(rows).to(bias.dtype) if rows else dy32.to(bias.dtype)
    if needed[0]:
        dnormed = dy32 if weight is None else dy32 * _wide(weight)
        centred = dnormed - dnormed.mean(dims, keepdim=True) - normed * (dnormed * normed).mean(dims, keepdim=True)
        dx = (centred * rstd.view(y.shape[: len(rows)] + (1,) * len(shape))).to(y.dtype)
    return dx, dweight, dbias


def rms_norm_output_bwd(
    dy: Tensor, y: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx like y and dweight [C], from y [..., C] and rstd [..., 1]; those not `needed` are None."""
    dy32, gain = _wide(dy), None
    if weight is not None:
        gain = 1.0 + _wide(weight) if formula == "one_plus_weight" else _wide(weight)
    normed = _normed(_wide(y), gain)
    dx = dweight = None
    if needed[1] and weight is not None:
        product = dy32 * normed
        dweight = product.reshape(-1, product.size(-1)).sum(0).to(weight.dtype)
    if needed[0]:
        dnormed = dy32 if gain is None else dy32 * gain
        dx = ((dnormed - normed * (dnormed * normed).mean(-1, keepdim=True)) * rstd).to(y.dtype)
    return dx, dweight


def _normed(scaled: Tensor, gain: Tensor | None) -> Tensor:
    """x^ from x^ * gain. If a gain became tiny during training, x^ is inaccurate but finite."""
    if gain is None:
        return scaled
    # no |x^| is larger than the square root of the number of normalised elements
    bound = gain.numel() ** 0.5
    return (scaled / torch.where(gain == 0, 1.0, gain)).clamp_(-bound, bound)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
