"""Ten bits have a quarter of the error of eight, in any layout. What eight bits decode exactly, ten bits do too."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.codecs import IntFine, IntGroup
from tests.codecs.helpers import DTYPES, LAYOUTS, relative, rounding, roundtrip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_number_is_further_off_than_an_eighth_of_a_step(layout: str, dtype: torch.dtype) -> None:
    for size, features in ((64, 130), (7, 33), (64, 1)):
        x = LAYOUTS[layout]((torch.randn(2, 3, 9, features) * 3 + 1).to(dtype))
        tensors, meta = IntFine(size).pack(x)
        step = tensors[1].double().repeat_interleave(size, 1)[:, :features].view(x.shape)
        error = (IntFine(size).unpack(tensors, meta).double() - x.double()).abs()
        # the decoded number is rounded to x's dtype, after a few fp32 roundings of numbers as large as the range
        slack = rounding(dtype) * (x.double().abs() + step) + 4e-7 * (256 * step + x.double().abs())
        assert bool((error <= step / 8 + slack).all())


def test_a_quarter_of_the_error_of_eight_bits() -> None:
    x = torch.randn(4, 50, 64)
    ours, eight = (relative(roundtrip(codec, x) - x, x) for codec in (IntFine(), IntGroup(8)))
    assert 0.2 * eight < ours < 0.3 * eight
    x = x.bfloat16()
    assert relative(roundtrip(IntFine(), x) - x, x) < 0.5 * eight


@pytest.mark.parametrize("value", [0.0, -3.5, 65504.0, float("nan"), float("inf")])
def test_equal_numbers_stay_as_they_are(value: float) -> None:
    x = torch.full((3, 70), value, dtype=torch.float16)
    y = roundtrip(IntFine(), x)
    assert not bool(y.isfinite().any()) if value - value != 0 else torch.equal(y, x)


def test_the_largest_numbers_of_fp16_stay_finite() -> None:
    x = (torch.rand(8, 64) * 2 - 1).mul_(65504).half()
    x[:, 0], x[:, 1] = 65504, -65504
    assert bool(roundtrip(IntFine(), x).isfinite().all())


def test_bytes_per_element() -> None:
    shape = torch.Size((2, 8, 512, 64))
    assert IntFine().nbytes(shape, torch.bfloat16) == shape.numel() * (10 / 8 + 4 / 64)
