"""The kernels of float8 have the reference's bits."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from hf_actcompress import reference
from hf_actcompress.kernels import float8 as kernel
from tests.codecs.helpers import LAYOUTS
from tests.kernels.harness import DEVICE, DTYPES, check, poisoned, samples

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
every_format = pytest.mark.parametrize("format", FORMATS, ids=str)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((3, 7), (7, 129)), ids=str)
@pytest.mark.parametrize("name", ["float8_pack", "float8_unpack"])
def test_bits_are_the_references(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples(name, dtype, *shape):
        check(name, args, bitwise=True)


def assert_same_bits(x: torch.Tensor, format: torch.dtype, group_size: int) -> None:
    with poisoned():
        codes, scale = kernel.float8_pack(x, format, group_size)
    codes_, scale_ = reference.float8_pack(x, format, group_size)
    torch.testing.assert_close(scale, scale_, rtol=0, atol=0, equal_nan=True)
    # as numbers, because a NaN may have either sign
    torch.testing.assert_close(codes.float(), codes_.float(), rtol=0, atol=0, equal_nan=True)


@every_format
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (9,), (2, 3, 24), (2, 3, 4, 17)], ids=str)
def test_every_layout(shape: tuple[int, ...], layout: str, format: torch.dtype) -> None:
    assert_same_bits(LAYOUTS[layout](torch.randn(shape, device=DEVICE)), format, 8)


@every_format
def test_every_code_and_every_tie(format: torch.dtype) -> None:
    """All finite numbers of the format, the ties between them and their fp32 neighbours, in a group of scale 1."""
    bits = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(format).float()
    values = bits[bits.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat([torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)])
    x = torch.cat([values, ties, near])[None]
    codes, scale = kernel.float8_pack(x, format, x.numel())
    assert scale.item() == 1.0
    assert torch.equal(codes.view(torch.uint8), x.to(format).view(torch.uint8))


@triton.jit
def _converted(x_ptr, codes_ptr, back_ptr, E4M3: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    code = kernel.encode(tl.load(x_ptr + at).to(tl.float32), E4M3, HARDWARE)
    tl.store(codes_ptr + at, code)
    tl.store(back_ptr + at, kernel.decode(code, E4M3, HARDWARE))


@every_format
@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits(dtype: torch.dtype, hardware: bool, format: torch.dtype) -> None:
    """All 16-bit numbers in the format's range become torch's own bytes, which are decoded to the right numbers.

    This holds with the GPU's instructions for conversion and without them.
    """
    if hardware and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the GPU has no such instructions")
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE).view(dtype)
    codes, back = torch.empty_like(x, dtype=torch.uint8), torch.empty_like(x, dtype=torch.float32)
    tile = 1 << 12
    _converted[(x.numel() // tile,)](x, codes, back, E4M3=format == torch.float8_e4m3fn, HARDWARE=hardware, TILE=tile)
    expected = x.to(format)
    finite = x.abs() <= torch.finfo(format).max
    if hardware and DEVICE.type == "cpu":
        # the interpreter's conversion does not round, so only numbers that the format has can be compared
        finite &= expected.to(dtype) == x
        assert int(finite.sum()) > 240
    assert torch.equal(codes[finite], expected.view(torch.uint8)[finite])
    assert torch.equal(back[finite], expected.float()[finite])
    if not hardware or DEVICE.type == "cuda":
        assert bool(back[x.isnan()].isnan().all())


@every_format
def test_every_code_is_decoded(format: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(format).view(2, 128)
    # the interpreter does not support subnormal bf16 numbers
    for scale in (1.0, 2.0**-100, 3e38):
        scales = torch.full((2, 1), scale, device=DEVICE, dtype=torch.bfloat16)
        for dtype in (*DTYPES, torch.float64):
            ours, stock = (f(codes, scales, dtype, 128) for f in (kernel.float8_unpack, reference.float8_unpack))
            torch.testing.assert_close(ours, stock, rtol=0, atol=0, equal_nan=True)


@every_format
@pytest.mark.parametrize("width", [16385, 20000])
def test_a_group_wider_than_a_tile(width: int, format: torch.dtype) -> None:
    x = torch.randn(2, width, device=DEVICE)
    assert_same_bits(x, format, width)
    packed = reference.float8_pack(x, format, width)
    ours = kernel.float8_unpack(*packed, torch.float32, width)
    assert torch.equal(ours, reference.float8_unpack(*packed, torch.float32, width))


@every_format
def test_ends_of_the_range_and_numbers_that_are_none(format: torch.dtype) -> None:
    big = torch.finfo(torch.float32).max
    rows = [[0.0] * 8, [-0.0, 0.0] * 4, [1e-40, -1e-45] * 4, [big, -big] * 4, [448.0, 449.0] * 4]
    rows += [[x, *range(7)] for x in (torch.inf, -torch.inf, torch.nan)]
    assert_same_bits(torch.tensor(rows, device=DEVICE), format, 4)
