"""LayerNorm's and RMSNorm's backward from the output, in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...kernels.common import WIDEST_ROW
from ...kernels.layer_norm import norm_bwd, present, samples
from . import reference

_Shape = tuple[int, ...]


def layer_norm_output_bwd(
    dy: Tensor,
    y: Tensor,
    shape: _Shape,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx like y, dweight, dbias; those not `needed` are None."""
    width = math.prod(shape)
    if width > WIDEST_ROW:
        return reference.layer_norm_output_bwd(dy, y, shape, rstd, weight, bias, needed)
    grads = norm_bwd(dy, y, weight, bias, None, rstd, width, True, True, False, list(needed))
    dx, dweight, dbias = present(grads, (y, weight, bias), needed)
    return dx, dweight, dbias


def rms_norm_output_bwd(
    dy: Tensor, y: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """dx like y and dweight [C]; those not `needed` are None."""
    if y.size(-1) > WIDEST_ROW:
        return reference.rms_norm_output_bwd(dy, y, weight, rstd, formula, needed)
    one_plus = formula == "one_plus_weight"
    grads = norm_bwd(dy, y, weight, None, None, rstd, y.size(-1), True, False, one_plus, [*needed, False])
    dx, dweight, _ = present(grads, (y, weight, None), (*needed, False))
    return dx, dweight


def _samples(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for dy, y, _, rstd, weight, bias in samples(*sizes):
        if weight is not None:
            # a gain of 0 cannot be divided by
            weight[0] = 0.0
        yield dy, y, (y.size(-1),), rstd, weight, bias, (True, True, True)


def _sample_rms(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    for dy, y, _, rstd, weight, bias in samples(*sizes):
        for formula in ("weight_after_cast", "one_plus_weight"):
            if bias is None:
                yield dy, y, weight, rstd, formula, (True, True)


SAMPLES = {"layer_norm_output_bwd": _samples, "rms_norm_output_bwd": _sample_rms}
