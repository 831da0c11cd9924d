"""Pointwise activations whose derivative is kept in a few bits per element.

Two ways to make a code of k bits from x:
  steps   the index of x's cell; f' is replaced by the nearest step function (few-bit backward, arXiv 2202.00441)
  values  f'(x) rounded to the nearest of 2**k levels, 0 (and 1) among them; at 8 bits they are a uniform grid
and, for comparison, "relus": two bits, the derivative of the sum of ReLUs nearest to f (ReGELU2, arXiv 2406.16282).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from ...errors import UnknownOptionError
from ...reference.activation import ACTIVATIONS, SAME_FUNCTION, activation_bwd
from ...reference.bits import pack_codes, unpack_codes
from .tables import CENTRES, GRIDS, LEVELS, PRIMITIVE_STEPS, STEPS

FEWBIT_METHODS: dict[str, tuple[int, ...]] = {"steps": (1, 2, 3, 4), "values": (2, 3, 4, 8), "relus": (2,)}

# f' has two values, so one bit is exact, whatever number of bits is asked for
TWO_VALUED = ("relu", "relu6", "leaky_relu", "hardsigmoid")
# kinds with options whose table holds only for these options
TABLE_OPTIONS = {"elu": (1.0,), "softplus": (1.0, 20.0)}
# kinds whose f' is 0 outside of the bounds
CLIPPED = ("gelu_clipped",)
# kind -> the kind whose table is used
TABLE = {"gelu_clipped": "gelu", **SAME_FUNCTION}
# kinds whose f' has no bound: the grid is scaled per row
UNBOUNDED = ("relu_squared",)


def fewbit_stored_bits(kind: str, bits: int, method: str) -> int:
    """Bits per element that `fewbit_codes` keeps. Raises UnknownOptionError if there is no such table."""
    if method not in FEWBIT_METHODS:
        raise UnknownOptionError("few-bit method", method, FEWBIT_METHODS)
    if bits not in FEWBIT_METHODS[method]:
        raise UnknownOptionError(f"number of bits for {method!r}", bits, FEWBIT_METHODS[method])
    known = PRIMITIVE_STEPS if method == "relus" else ACTIVATIONS
    if kind not in known:
        raise UnknownOptionError(f"activation for {method!r}", kind, known)
    return 1 if kind in TWO_VALUED else bits


def fewbit_codes(
    x: Tensor, kind: str, options: tuple[float, ...], bits: int, method: str
) -> tuple[Tensor, Tensor | None]:
    """Packed codes of f'(x), and the factor of their levels. `kind` as in `ACTIVATIONS`.

    The factor is fp32 (fp64 for fp64). If f' has no bound, it is the scale of each row [..., 1]. Otherwise it is [1]:
    1, or NaN if f' of any element is NaN. It is None if the code is exact: then f' of NaN is one of the two values.
    """
    stored = fewbit_stored_bits(kind, bits, method)
    x = (x if x.dtype == torch.float64 else x.float()).contiguous()
    scale = None
    if kind in TWO_VALUED:
        # one 1 for all elements: a tensor of ones would be as large as x
        codes = activation_bwd(x.new_ones(()).expand_as(x), x, kind, options) != two_values(kind, options)[0]
    elif kind in UNBOUNDED:
        slope = activation_bwd(torch.ones_like(x), x, kind, options)
        scale = row_maximum(slope).div_(2**bits - 1)
        # for a row of zeros any factor will do. inf * 0 is NaN: take the code of the largest slope, which decodes to
        # inf
        reciprocal = scale.clamp(min=torch.finfo(scale.dtype).tiny).reciprocal()
        codes = (slope * reciprocal).round_().nan_to_num_(2**bits - 1)
    else:
        scale = _one_or_nan(x, kind, options)
        codes = unpacked_codes(x, kind, options, bits, method)
    return pack_codes(codes.to(torch.uint8), stored), scale


def fewbit_bwd(
    dy: Tensor, codes: Tensor, scale: Tensor | None, kind: str, options: tuple[float, ...], bits: int, method: str
) -> Tensor:
    """dx = dy * q in dy's dtype, rounded once, where q is the level of each code. dy has x's shape."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    levels = torch.tensor(fewbit_levels(kind, options, bits, method), dtype=wide, device=dy.device)
    stored = fewbit_stored_bits(kind, bits, method)
    # `levels[codes]` would make indices of 8 bytes per element
    factor = levels.index_select(0, unpack_codes(codes, stored, dy.numel()).int()).view(dy.shape)
    if scale is not None:
        factor = factor * scale
    return factor.mul_(dy).to(dy.dtype)


def two_values(kind: str, options: tuple[float, ...]) -> tuple[float, float]:
    """The two values of f'."""
    return options[0] if kind == "leaky_relu" else 0.0, 1 / 6 if kind == "hardsigmoid" else 1.0


def _one_or_nan(x: Tensor, kind: str, options: tuple[float, ...]) -> Tensor:
    """[1]: NaN if f' of an element of x is NaN, else 1. x's extremes show it: NaN itself, and inf for most kinds."""
    if x.numel() == 0:
        return x.new_ones(1)
    extremes = torch.stack(x.aminmax())
    slopes = activation_bwd(torch.ones_like(extremes), extremes, kind, options)
    return torch.where(slopes.isnan().any(), torch.nan, torch.ones_like(slopes[:1]))


def row_maximum(x: Tensor) -> Tensor:
    """[..., 1]: the largest number of each row, 0 for an empty one; a scalar is its own."""
    if x.numel() == 0 or x.dim() == 0:
        return x.new_zeros(x.shape[:-1] + (1,)) if x.dim() else x.clone()
    return x.amax(-1, keepdim=True)


def unpacked_codes(x: Tensor, kind: str, options: tuple[float, ...], bits: int, method: str) -> Tensor:
    """One code per element of x, as fp32 or fp64, for kinds whose f' has many values within bounds."""
    if method == "values":
        return _value_codes(activation_bwd(torch.ones_like(x), x, kind, options), kind, bits)
    return _step_codes(x, kind, options, bits, method)


def _value_codes(slope: Tensor, kind: str, bits: int) -> Tensor:
    if bits == 8:
        zero, step = GRIDS[TABLE.get(kind, kind)]
        return slope.div_(step).round_().add_(zero).clamp_(0, 255)
    borders = fewbit_borders(kind, bits, "values")
    return torch.bucketize(slope, torch.tensor(borders, dtype=slope.dtype, device=slope.device), out_int32=True)


def _step_codes(x: Tensor, kind: str, options: tuple[float, ...], bits: int, method: str) -> Tensor:
    base = TABLE.get(kind, kind)
    at = (x - CENTRES[base]).abs() if base in CENTRES and method == "steps" else x
    borders = fewbit_borders(kind, bits, method)
    codes = torch.bucketize(at, torch.tensor(borders, dtype=x.dtype, device=x.device), out_int32=True)
    if kind in CLIPPED:
        low, high = options
        # these activations are increasing where they reach a bound
        levels = fewbit_levels(kind, options, bits, method)
        # outside of the bounds f' is 0
        flat = min(range(len(levels)), key=lambda code: abs(levels[code]))
        codes = torch.where((x < low) | (x > high), flat, codes)
    return codes


def fewbit_borders(kind: str, bits: int, method: str) -> tuple[float, ...]:
    """The borders between cells of x, or of f' for "values" (with 8 bits there is a grid instead)."""
    base = TABLE.get(kind, kind)
    if method == "values":
        return tuple((low + high) / 2 for low, high in pairwise(LEVELS[base][bits]))
    return PRIMITIVE_STEPS[base][0] if method == "relus" else STEPS[base][bits][0]


def fewbit_levels(kind: str, options: tuple[float, ...], bits: int, method: str) -> tuple[float, ...]:
    """The level of each code; if f' has no bound, it is multiplied by its row's scale."""
    if kind in TWO_VALUED:
        return two_values(kind, options)
    if kind in UNBOUNDED:
        return tuple(float(code) for code in range(2**bits))
    base = TABLE.get(kind, kind)
    if method == "values":
        if bits != 8:
            return LEVELS[base][bits]
        zero, step = GRIDS[base]
        return tuple((code - zero) * step for code in range(256))
    return PRIMITIVE_STEPS[base][1] if method == "relus" else STEPS[base][bits][1]
