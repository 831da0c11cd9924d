"""The few-bit kernels give the reference's codes, except where f' is at a border, and gradients with its bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_actcompress import reference
from hf_actcompress.kernels.activation import OPTIONS, STOCKS
from hf_actcompress.methods.fewbit import kernel
from hf_actcompress.methods.fewbit.reference import (
    FEWBIT_METHODS,
    TABLE,
    TWO_VALUED,
    UNBOUNDED,
    fewbit_borders,
    fewbit_bwd,
    fewbit_codes,
    fewbit_stored_bits,
)
from hf_actcompress.methods.fewbit.tables import GRIDS, PRIMITIVE_STEPS
from hf_actcompress.reference import ACTIVATIONS
from hf_actcompress.reference.bits import pack_codes, packed_bytes, unpack_codes
from tests.kernels.harness import DEVICE, DTYPES, check, poisoned, samples

# (kind, options, bits, method) of every table
CONFIGURATIONS = [
    (kind, OPTIONS.get(kind, ()), bits, method)
    for kind in STOCKS
    for method, choices in FEWBIT_METHODS.items()
    if method != "relus" or kind in PRIMITIVE_STEPS
    for bits in choices
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (3, 2500)], ids=str)
@pytest.mark.parametrize("name", ["fewbit_bwd", "fewbit_codes"])
def test_samples(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples(name, dtype, *shape):
        check(name, args, bitwise=True)


def borders(kind: str, bits: int) -> list[float]:
    """The borders between the codes of f', for method "values"."""
    if kind in TWO_VALUED or kind in UNBOUNDED:
        return []
    if bits < 8:
        return list(fewbit_borders(kind, bits, "values"))
    zero, step = GRIDS[TABLE.get(kind, kind)]
    return [(code + 0.5 - zero) * step for code in range(255)]


def test_every_kind_is_there() -> None:
    assert {kind for kind, *_ in CONFIGURATIONS} == set(ACTIVATIONS)


@pytest.mark.parametrize(("kind", "options", "bits", "method"), CONFIGURATIONS)
def test_codes_differ_at_borders_only(kind: str, options: tuple[float, ...], bits: int, method: str) -> None:
    x = torch.linspace(-8, 8, 4099, device=DEVICE)
    if method != "values" and kind not in (*TWO_VALUED, *UNBOUNDED):
        # also the borders of x themselves, which belong to the code below
        x = torch.cat((x, x.new_tensor(fewbit_borders(kind, bits, method))))
    with poisoned():
        ours, scale = kernel.fewbit_codes(x, kind, options, bits, method)
    stock, stock_scale = fewbit_codes(x, kind, options, bits, method)
    assert ours.shape == stock.shape and (scale is None) == (stock_scale is None)
    assert scale is None or torch.equal(scale, stock_scale)
    width = fewbit_stored_bits(kind, bits, method)
    a, b = (unpack_codes(codes, width, x.numel()).int() for codes in (ours, stock))
    differ = a != b
    if not differ.any():
        return
    assert method == "values" and bool(((a - b).abs() <= 1).all())
    slope = reference.activation_bwd(torch.ones_like(x).double(), x.double(), kind, options)[differ]
    distance = (slope[:, None] - torch.tensor(borders(kind, bits), device=DEVICE).double()).abs().amin(1)
    # f' is at most 1.3; torch and the kernel compute it from exp and erf, with a few roundings each
    assert bool((distance <= 16 * torch.finfo(torch.float32).eps).all())


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(broken: float) -> None:
    """The scale is NaN where the reference's is, and elsewhere the codes equal the reference's."""
    x = torch.tensor([0.5, broken, -0.5], device=DEVICE)
    for kind, options, bits, method in CONFIGURATIONS:
        args = x.view(3, 1), kind, options, bits, method
        (ours, scale), (stock, stock_scale) = kernel.fewbit_codes(*args), fewbit_codes(*args)
        if scale is not None:
            assert torch.equal(scale.isnan(), stock_scale.isnan()), args
        if scale is None or kind in UNBOUNDED or not scale.isnan():
            assert torch.equal(ours, stock), args


def test_a_row_of_zeros_and_a_scalar() -> None:
    for x in (torch.zeros(2, 5, device=DEVICE), torch.tensor(2.0, device=DEVICE), torch.randn(2, 3, 5).transpose(0, 2)):
        args = (x.to(DEVICE), "relu_squared", (), 4, "values")
        ours, stock = kernel.fewbit_codes(*args), fewbit_codes(*args)
        assert torch.equal(ours[0], stock[0]) and ours[1] is not None and torch.equal(ours[1], stock[1])
        dy: Tensor = torch.ones_like(args[0])
        packed = pack_codes(torch.arange(x.numel(), device=DEVICE).to(torch.uint8) % 16, 4)
        assert packed.numel() == packed_bytes(x.numel(), 4)
        mine = kernel.fewbit_bwd(dy, packed, ours[1], *args[1:])
        assert torch.equal(mine, fewbit_bwd(dy, packed, stock[1], *args[1:]))
