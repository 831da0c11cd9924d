"""The kernels of activations that keep their output: mask bits are the reference's, gradients are within the law."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_actcompress.methods.inverted.reference import INVERTED
from hf_actcompress.reference.bits import unpack_mask
from tests.kernels.harness import DEVICE, DTYPES, check, run, samples, specified

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (3, 700)], ids=str)
def test_bits_are_the_references(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples("activation_output_bits", dtype, *shape):
        check("activation_output_bits", args, bitwise=True)


@every_dtype
def test_inf_and_nan_are_marked_as_on_the_left(dtype: torch.dtype) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -5.0, 0.0, 5.0], device=DEVICE).to(dtype)
    for bits in (*run("activation_output_bits", (x, "silu")), *specified("activation_output_bits", (x, "silu"))):
        assert bits is not None and unpack_mask(bits, x.shape).tolist() == [True] * 4 + [False] * 2


@every_dtype
def test_gradient_from_the_output(dtype: torch.dtype) -> None:
    kinds = set()
    # more than one tile; the last byte is not full
    for args in samples("activation_output_bwd", dtype, 3, 1367):
        check("activation_output_bwd", args)
        kinds.add(args[-1])
    assert kinds == set(INVERTED)


def ends(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs at and beyond the ends of the fits, inf and NaN too; the first eight on the right branch, others left."""
    fit = INVERTED[kind]
    right = [fit.y_min - 1e-3, fit.y_min, 0.0, fit.split**2 + fit.y_min, fit.end**2 + fit.y_min, 1e4, torch.inf]
    left = [fit.y_min - 1e-3, fit.y_min, fit.y_min * 0.5, -1e-9, -1e-20, -0.0, 0.0]
    y = torch.tensor([*right, 50.0, *left, -1e-4, torch.inf, torch.nan], device=DEVICE).to(dtype)
    return y, torch.tensor([0, 255, 255], dtype=torch.uint8, device=DEVICE)


@every_dtype
@pytest.mark.parametrize("kind", INVERTED)
def test_ends_of_the_branches(kind: str, dtype: torch.dtype) -> None:
    y, bits = ends(kind, dtype)
    args = (torch.ones_like(y), y, bits, kind)
    (ours,), (stock,) = run("activation_output_bwd", args), specified("activation_output_bwd", args)
    assert ours is not None and stock is not None
    assert bool((ours[4:8] == 1).all())
    assert bool(ours[-2:].isnan().all())
    # where two pieces of a fit meet, either may be used: the error of each is at most 2e-5
    eps = torch.finfo(dtype).eps
    # near the minimum f' grows with the square root of y's distance from it, and torch's division on a GPU, which
    # multiplies with a rounded reciprocal, finds a distance of one rounding at the minimum itself
    if dtype == torch.float32:
        assert stock[9].abs() <= max(4e-5, abs(INVERTED[kind].y_min) * (2 * eps) ** 0.5)
        assert ours[9].abs() <= 4e-5
        stock[9] = ours[9]
    torch.testing.assert_close(ours, stock, rtol=0 if eps < 1e-6 else eps, atol=4e-5, equal_nan=True)


def test_zero_size_and_mixed_dtypes() -> None:
    dy = torch.randn(5, device=DEVICE, dtype=torch.float32)
    y = torch.rand(5, device=DEVICE).to(torch.bfloat16)
    bits = torch.zeros(1, dtype=torch.uint8, device=DEVICE)
    assert not unpack_mask(bits, y.shape).any()
    for size in (0, 5):
        args = (dy[:size], y[:size], bits[: -(-size // 8)], "silu")
        (ours,), (stock,) = run("activation_output_bwd", args), specified("activation_output_bwd", args)
        assert ours is not None and stock is not None and ours.dtype == stock.dtype == torch.bfloat16
        torch.testing.assert_close(ours, stock, rtol=2**-8, atol=0)
