"""fp8: errors are within the format's rounding, nothing saturates, and inf and NaN do not become finite."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_actcompress.codecs import Float8
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.memory.measurement.allocator import allocator_trace
from tests.codecs.helpers import DTYPES, activations, rounding, roundtrip

# largest relative error of a normal number, largest error of a subnormal one, largest number
FORMATS = {"e4m3": (2**-4, 2**-10, 448), "e5m2": (2**-3, 2**-17, 57344)}

codecs = st.builds(Float8, st.sampled_from(sorted(FORMATS)), st.sampled_from((None, 1, 16, 128)))


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_error_is_within_the_format(x: Tensor, codec: Float8) -> None:
    y = roundtrip(codec, x)
    if x.dim() == 0:
        x, y = x.view(1), y.view(1)
    if x.numel() == 0:
        return
    relative, absolute, largest = FORMATS[codec.format]
    groups = []
    for group in x.double().split(codec.group_size or x.size(-1), dim=-1):
        # the scale is rounded up to bf16, which adds at most 2^-7 of it
        scale = group.abs().amax(-1, keepdim=True) / largest * (1 + 2**-7) + torch.finfo(torch.bfloat16).tiny
        groups.append(scale.expand_as(group))
    magnitude = x.double().abs()
    bound = torch.maximum(relative * magnitude, absolute * torch.cat(groups, -1))
    # a division and a product are rounded in fp32, and the result in x's dtype
    bound = bound + (2 * torch.finfo(torch.float32).eps + 2 * rounding(x.dtype)) * magnitude
    bound += torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    error = (y.double() - x.double()).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.3f} of the bound"


@settings(deadline=None, max_examples=100)
@given(activations(), codecs)
def test_bytes_are_as_declared_and_the_input_is_not_touched(x: Tensor, codec: Float8) -> None:
    before = x.clone()
    tensors, _ = codec.pack(x)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so_and_in_its_group(poison: float, format: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 96).to(dtype)
    x[2, 40] = poison
    y = roundtrip(Float8(format, group_size=32), x)
    assert not y[2, 40].isfinite()
    y[2, 32:64] = 0
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_dtype_do_not_overflow(format: str, dtype: torch.dtype) -> None:
    # a decoded value may be a little larger than x. In fp16 it is limited to the largest number, in other dtypes it is
    # not. The scale is in bf16, so the test stays below bf16's largest number, with a margin
    end = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max / 1.1)
    x = torch.linspace(-end, end, 64, dtype=torch.float64).to(dtype).view(1, 64)
    assert bool(roundtrip(Float8(format, 16), x).isfinite().all())
    assert bool(roundtrip(Float8(format, None), x).isfinite().all())


def test_values_of_the_format_come_back_exactly() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = x[x.isfinite()].view(1, -1)
    assert float(x.abs().max()) == 448
    # the scale is then exactly 1
    assert torch.equal(roundtrip(Float8("e4m3", None), x), x)


def test_transient_memory_is_a_chunk_and_not_a_copy() -> None:
    x = torch.randn(4096, 512).bfloat16()
    codec = Float8()
    memory = allocator_trace(lambda: codec.pack(x)[0])
    assert memory.net_bytes == codec.nbytes(x.shape, x.dtype)
    assert memory.peak_bytes - memory.net_bytes <= 3 * 4 * 2**18 < x.numel() * x.element_size()


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'e4m3', 'e5m2'"):
        Float8("e3m4")
    with pytest.raises(ValueError, match="group_size >= 1"):
        Float8(group_size=0)
