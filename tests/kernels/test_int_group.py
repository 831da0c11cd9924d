"""Group quantisation's kernels: the reference's bits under rounding to nearest, no bias under stochastic rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_actcompress import reference
from hf_actcompress.dispatch import use
from hf_actcompress.kernels import int_group as kernel
from tests.codecs.helpers import LAYOUTS
from tests.kernels.harness import DEVICE, DTYPES, check, poisoned, samples

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", ((3, 7), (7, 129)), ids=str)


@pytest.mark.daily(4)
@every_dtype
@every_shape
@pytest.mark.parametrize("name", ["int_group_pack", "int_group_unpack"])
def test_bits_are_the_references(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples(name, dtype, *shape):
        check(name, args, bitwise=True)


def assert_same_bits(x: Tensor, bits: int, group_size: int, channels: Tensor | None = None) -> None:
    with poisoned():
        ours = kernel.int_group_pack(x, bits, group_size, False, channels)
    stock = reference.int_group_pack(x, bits, group_size, False, channels)
    # the scale of a group with a NaN is NaN, and its zero point then does not matter
    lost = stock[1].isnan()
    ours, stock = ((codes, scale, zero.masked_fill(lost, 0)) for codes, scale, zero in (ours, stock))
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (9,), (3, 40), (2, 3, 24), (2, 3, 4, 17), (2, 1, 2, 3, 8)], ids=str)
def test_every_layout(shape: tuple[int, ...], layout: str) -> None:
    x = LAYOUTS[layout](torch.randn(shape, device=DEVICE))
    assert_same_bits(x, 4, 8)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("width", [16385, 20000])
def test_a_group_wider_than_a_tile(bits: int, width: int) -> None:
    x = torch.randn(2, width, device=DEVICE)
    assert_same_bits(x, bits, width, torch.randperm(width, device=DEVICE)[:5])
    packed = reference.int_group_pack(x, bits, width, False)
    unpacked = kernel.int_group_unpack(*packed, width, torch.float32, bits, width)
    assert torch.equal(unpacked, reference.int_group_unpack(*packed, width, torch.float32, bits, width))


def test_ends_of_the_range_constants_and_numbers_that_are_none() -> None:
    big = torch.finfo(torch.float32).max
    # the interpreter does not support subnormal bf16 numbers
    rows = [[0.0] * 8, [-0.0, 0.0] * 4, [3e-38, -3e-38] * 4, [big, -big] * 4, [255.0, 0.0] * 4, [-3.3] * 8]
    rows += [[x, *range(7)] for x in (torch.inf, -torch.inf, torch.nan)]
    x = torch.tensor(rows, device=DEVICE)
    for bits in (8, 4, 2):
        assert_same_bits(x, bits, 4)


def test_fp64_is_decoded_in_fp64() -> None:
    packed = reference.int_group_pack(torch.randn(3, 10, device=DEVICE, dtype=torch.float64), 4, 4, False)
    assert torch.equal(
        kernel.int_group_unpack(*packed, 10, torch.float64, 4, 4),
        reference.int_group_unpack(*packed, 10, torch.float64, 4, 4),
    )


def draws(x: Tensor, bits: int, group_size: int) -> Tensor:
    with use("triton"):
        packed = kernel.int_group_pack(x, bits, group_size, True)
        return kernel.int_group_unpack(*packed, x.size(-1), x.dtype, bits, group_size)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (4, 24), (2, 5)])
def test_stochastic_rounding_has_no_bias(bits: int, group_size: int) -> None:
    row = torch.randn(60, device=DEVICE)
    count = 256
    mean = draws(row.repeat(count, 1), bits, group_size).mean(0)
    step = (row.max() - row.min()) / (2**bits - 1) * 1.01
    # a code is one of two neighbours, so Hoeffding's bound applies; for 60 means it fails once in 10^9 times
    bound = step * (torch.tensor(2 * 60 * 1e9).log() / (2 * count)).sqrt()
    assert bool(((mean - row).abs() <= bound).all())
    # the mean over all 60 has a smaller bound, which would find a small bias of the same sign
    assert (mean - row).mean().abs() <= bound / 60**0.5


def test_stochastic_draws_follow_the_codecs_seed() -> None:
    x = torch.randn(6, 40, device=DEVICE)
    reference.seed_codecs(3)
    first, second = draws(x, 2, 8), draws(x, 2, 8)
    reference.seed_codecs(3)
    assert torch.equal(draws(x, 2, 8), first)
    assert not torch.equal(first, second)


def test_stochastic_draws_are_independent_of_each_other() -> None:
    # 0.5 is halfway between two codes, so each element gives one random bit
    x = torch.full((400, 64), 0.5, device=DEVICE)
    x[:, ::8], x[:, 1::8] = 0, 3
    up = (draws(x, 2, 8) > 0.5).float().view(400, 8, 8)[:, :, 2:].flatten(1)
    # the largest correlation between two of 48 columns
    correlation = torch.corrcoef(up.T).fill_diagonal_(0).abs().max()
    # a correlation of 400 draws has a deviation of 1/20; the largest of 48^2 / 2 exceeds the limit once in 10^6 times
    assert correlation < 6.2 / 20
