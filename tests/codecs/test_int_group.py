"""Group quantisation: errors within the step, no bias under stochastic rounding, outliers exact, nothing clipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress.codecs import Codec, IntGroup
from hf_actcompress.errors import CodecError, UnknownOptionError
from hf_actcompress.memory.measurement.allocator import allocator_trace
from hf_actcompress.reference import seed_codecs
from hf_actcompress.reference.groups import bf16_above, bf16_below, operands
from tests.codecs.helpers import DTYPES, activations, hoeffding, relative, rounding, roundtrip

codecs = st.builds(
    IntGroup,
    st.sampled_from((2, 3, 4, 5, 8)),
    st.sampled_from((1, 5, 16, 64, 128)),
    st.sampled_from(("nearest", "stochastic")),
    st.sampled_from((0, 1, 3)),
)


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_the_sign_is_kept_where_that_is_asked_for(x: Tensor, codec: IntGroup) -> None:
    """A decoded value is above zero exactly where x is. It takes the same bytes, and its error is at most one step."""
    x = x - x.double().median().to(x.dtype) if x.numel() else x
    signed = codec.keeping_sign()
    assert signed.nbytes(x.shape, x.dtype) == codec.nbytes(x.shape, x.dtype)
    y = roundtrip(signed, x)
    # a value very close to zero may become zero when it is rounded to fp16
    clear = x.abs() > 4 * torch.finfo(x.dtype).smallest_normal
    assert torch.equal((y > 0)[clear], (x > 0)[clear])
    if x.numel() and x.dim():
        error, step = (y.double() - x.double()).abs(), widest_step(codec, x)
        slack = 2 * rounding(x.dtype) * (x.double().abs() + step) + 2**-20 * step * 2**codec.bits
        assert bool((error <= step + slack + torch.finfo(x.dtype).smallest_normal).all())


def widest_step(codec: IntGroup, x: Tensor) -> Tensor:
    """For each element of x, an upper bound of its group's step, in fp64.

    The step is the group's range divided by the number of steps, where both ends are rounded outwards to bf16.
    """
    steps = []
    for group in x.double().split(codec.group_size, dim=-1):
        low, high = group.aminmax(dim=-1, keepdim=True)
        # one bf16 ulp is at most 2^-7 of the number
        step = (high - low + low.abs() * 2**-7) / (2**codec.bits - 1) * (1 + 2**-7) + torch.finfo(torch.bfloat16).tiny
        steps.append(step.expand_as(group))
    return torch.cat(steps, dim=-1)


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_error_is_within_the_step(x: Tensor, codec: IntGroup) -> None:
    y = roundtrip(codec, x)
    if x.dim() == 0:
        x, y = x.view(1), y.view(1)
    if x.numel() == 0:
        return
    step = widest_step(codec, x)
    share = 0.5 if codec.rounding == "nearest" else 1.0
    # four fp32 roundings, of a subtraction, a division, a product and a sum; the numbers are at most as large as the
    # group's magnitude and range together
    magnitude = step * (2**codec.bits - 1) + x.double().abs()
    bound = (
        share * step + 4 * torch.finfo(torch.float32).eps * magnitude + rounding(x.dtype) * (x.double().abs() + step)
    )
    bound += torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    error = (y.double() - x.double()).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max()):.3f} of the bound"


@settings(deadline=None, max_examples=100)
@given(activations(), codecs)
def test_bytes_are_as_declared_and_the_input_is_not_touched(x: Tensor, codec: IntGroup) -> None:
    before = x.clone()
    tensors, _ = codec.pack(x)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_stochastic_rounding_is_unbiased(bits: int, dtype: torch.dtype) -> None:
    seed_codecs(bits)
    x = torch.randn(16, 96).to(dtype)
    codec = IntGroup(bits, 32, "stochastic")
    draws = 400
    mean = torch.zeros(x.shape, dtype=torch.float64)
    for _ in range(draws):
        mean += roundtrip(codec, x).double() / draws
    step = widest_step(codec, x)
    # every draw is one of two neighbouring codes. Its decoded value is rounded to x's dtype, to nearest, and that
    # rounding does not average out
    slack = rounding(dtype) * (x.double().abs() + step) + 4 * torch.finfo(torch.float32).eps * 2**bits * step
    assert bool(((mean - x.double()).abs() <= hoeffding(draws, x.numel()) * step + slack).all())


def test_stochastic_error_falls_with_the_root_of_the_draws() -> None:
    x = torch.randn(64, 128, dtype=torch.float64)
    codec = IntGroup(4, 64, "stochastic")
    draws = torch.stack([roundtrip(codec, x) for _ in range(256)])
    few = (draws.view(16, 16, *x.shape).mean(1) - x).square().mean().sqrt()
    many = (draws.mean(0) - x).square().mean().sqrt()
    # the mean square of 8192 independent elements has a relative deviation of about sqrt(2 / 8192); the tolerance is
    # five such deviations
    assert float(few / many) == pytest.approx(4, rel=5 * math.sqrt(2 / x.numel()))


def test_nearest_does_not_average_out_but_errs_less() -> None:
    x = torch.randn(256, 256, dtype=torch.float64)
    nearest, stochastic = IntGroup(4), IntGroup(4, rounding="stochastic")
    assert torch.equal(roundtrip(nearest, x), roundtrip(nearest, x))
    ratio = relative(roundtrip(stochastic, x) - x, x) / relative(roundtrip(nearest, x) - x, x)
    # for a uniform remainder, the errors are step / sqrt(6) and step / sqrt(12)
    assert ratio == pytest.approx(math.sqrt(2), rel=0.05)


def test_the_codecs_generator_decides_and_nothing_else() -> None:
    x = torch.randn(8, 64)
    codec = IntGroup(2, rounding="stochastic")
    seed_codecs(1)
    first, second = roundtrip(codec, x), roundtrip(codec, x)
    seed_codecs(1)
    assert torch.equal(roundtrip(codec, x), first)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    roundtrip(codec, x)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_of_a_grid_come_back_exactly(bits: int, dtype: torch.dtype) -> None:
    """Values on the grid of codes come back exactly, for every level and in every position of a byte."""
    levels = 2**bits
    x = (torch.arange(levels).repeat(3)[: 2 * levels + levels // 2].to(dtype) - 1).view(1, -1)
    x = torch.cat([x.roll(shift, 1) for shift in range(8)])
    assert torch.equal(roundtrip(IntGroup(bits, group_size=x.size(1)), x), x)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so_and_in_its_group(poison: float, rounding: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 96).to(dtype)
    x[2, 40] = poison
    y = roundtrip(IntGroup(8, 32, rounding), x)
    # the scale of its group is inf or NaN, so the other values of that group are not finite either
    assert not y[2, 40].isfinite()
    y[2, 32:64] = 0
    assert bool(y.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_ends_of_the_dtype_do_not_overflow(dtype: torch.dtype) -> None:
    # the scale and the zero point are in bf16. The range is twice as large as the largest value, so values may be about
    # half of bf16's largest number at most
    end = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max / 2.1)
    x = torch.linspace(-end, end, 64, dtype=torch.float64).to(dtype).view(1, 64)
    for codec in (IntGroup(8), IntGroup(4), IntGroup(2, rounding="stochastic"), IntGroup(8, 5)):
        y = roundtrip(codec, x)
        assert bool(y.isfinite().all())
        assert bool(((y.double() - x.double()).abs() <= widest_step(codec, x)).all())


def test_a_range_that_the_scale_cannot_tell_is_not_hidden() -> None:
    x = torch.tensor([[-3e38, 3e38]])
    assert not bool(roundtrip(IntGroup(8), x).isfinite().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outlier_channels_are_exact_and_spare_their_neighbours(dtype: torch.dtype) -> None:
    x = torch.randn(32, 128).to(dtype)
    x[:, [7, 70]] *= 100
    plain, apart = roundtrip(IntGroup(4), x), roundtrip(IntGroup(4, outliers=2), x)
    assert torch.equal(apart[:, [7, 70]], x[:, [7, 70]])
    rest = [c for c in range(128) if c not in (7, 70)]
    # the others are quantised as if the outliers were not there
    step = widest_step(IntGroup(4, group_size=63), x[:, rest])
    error = (apart.double() - x.double()).abs()[:, rest]
    assert bool((error <= 0.5 * step + rounding(dtype) * (x[:, rest].double().abs() + step) + 1e-6).all())
    assert relative(apart - x, x) * 10 < relative(plain - x, x)


def test_more_outliers_than_channels_is_lossless() -> None:
    x = torch.randn(3, 5)
    assert torch.equal(roundtrip(IntGroup(2, outliers=9), x), x)


def test_transient_memory_is_a_chunk_and_not_a_copy() -> None:
    x = torch.randn(4096, 512).bfloat16()
    codec = IntGroup(4, rounding="stochastic")
    memory = allocator_trace(lambda: codec.pack(x)[0])
    assert memory.net_bytes == codec.nbytes(x.shape, x.dtype)
    # a chunk of 2^18 elements needs values, noise, codes and tensors for packing: at most four in fp32 at a time
    assert memory.peak_bytes - memory.net_bytes <= 4 * 4 * 2**18 < x.numel() * x.element_size() * 2
    packed = codec.pack(x)
    memory = allocator_trace(lambda: codec.unpack(*packed))
    assert memory.net_bytes == x.numel() * x.element_size()
    assert memory.peak_bytes - memory.net_bytes <= 4 * 4 * 2**18


def test_wrong_options_and_dtypes_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="2, 3, 4, 5, 8"):
        IntGroup(6)
    with pytest.raises(UnknownOptionError, match="'nearest', 'stochastic'"):
        IntGroup(8, rounding="up")
    with pytest.raises(ValueError, match="group_size >= 1"):
        IntGroup(8, group_size=0)
    with pytest.raises(CodecError, match="int64"):
        IntGroup(8).pack(torch.arange(4))


@pytest.mark.parametrize("codec", [IntGroup(8, keep_sign=True), IntGroup(4, outliers=2), IntGroup(3)], ids=str)
def test_inductor_makes_the_same_bytes(codec: Codec) -> None:
    """Inductor removes a cast to bf16 and back. Codes must be made for the range rounded to bf16 all the same."""
    x = 0.3 * torch.randn(64, 352)
    expected, meta = codec.pack(x)
    found = torch.compile(lambda x: codec.pack(x)[0])(x)
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(torch.compile(lambda *kept: codec.unpack(kept, meta))(*found), codec.unpack(expected, meta))


class _Launches(TorchDispatchMode):
    """Counts the ops that run a kernel."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "empty" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("codec", "packing", "unpacking"),
    [(IntGroup(8), 15, 3), (IntGroup(4), 16, 6), (IntGroup(8, outliers=4), 22, 4), (IntGroup(4, outliers=4), 23, 7)],
    ids=str,
)
def test_how_many_calls_a_round_trip_takes(codec: Codec, packing: int, unpacking: int) -> None:
    x = torch.randn(2, 5, 64)
    with _Launches() as pack:
        tensors, meta = codec.pack(x)
    with _Launches() as unpack:
        codec.unpack(tensors, meta)
    assert (pack.count, unpack.count) == (packing, unpacking)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_ends_of_a_range_are_rounded_outwards(dtype: torch.dtype) -> None:
    """They are rounded to the next bf16 number; a bf16 number stays as it is."""
    known = torch.randint(-(2**15), 2**15, (4000,), dtype=torch.int16).view(torch.bfloat16)
    known = known[known.isfinite() & (known.abs() >= torch.finfo(torch.bfloat16).tiny)].to(dtype)
    ends = torch.tensor([torch.inf, -torch.inf], dtype=dtype).repeat_interleave(known.numel())
    between = torch.nextafter(known.repeat(2), ends)
    x = torch.cat((known, between, torch.randn(1000, dtype=dtype)))[:, None]
    numbers = operands(255, x)
    below = bf16_below(x, numbers).bfloat16()
    above = bf16_above(x.abs(), numbers)[:, None]
    after = torch.nextafter(below, torch.tensor(torch.inf, dtype=torch.bfloat16))
    before = torch.nextafter(above, torch.tensor(-torch.inf, dtype=torch.bfloat16))
    assert bool(((below.double() <= x) & (x < after.double())).all())
    assert bool(((before.double() < x.abs()) & (x.abs() <= above.double())).all())
    assert torch.equal(bf16_below(known, numbers), known)
