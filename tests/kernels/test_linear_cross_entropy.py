"""The loss head's kernels are within the law for chunks of any size, and can write gradients in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress.kernels import linear_cross_entropy as kernel
from hf_actcompress.reference import linear_cross_entropy as reference
from hf_actcompress.reference import logits_chunks
from tests.kernels.harness import DEVICE, DTYPES, assert_law, present, run, samples, specified, wide
from tests.oracle import assert_equal_bits

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# rows and vocabulary: one chunk, several, wider than a tile
every_shape = pytest.mark.parametrize("shape", [(1, 1), (13, 7), (12, 200), (2, 4999)], ids=str)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MIN_CHUNK", "MIN_DEVICE_CHUNK"):
        monkeypatch.setattr(logits_chunks, bound, 12 * 64)


def assert_lawful(name: str, args: Any, oracle: Any, terms: list[Tensor | None]) -> None:
    ours = run(name, args)
    assert_law(ours, specified(name, args), specified(name, oracle), terms)
    assert_equal_bits(present(run(name, args)), present(ours))


def sum_terms(x: Tensor, pointwise: Any) -> Tensor:
    """The effect of one rounding of each x - max and of each exp on the logarithm of the sum."""
    x = logits_chunks.applied(pointwise, x)
    return (x.softmax(1) * (1 + x.amax(1, keepdim=True) - x)).sum(1)


@every_dtype
@every_shape
def test_fwd(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """From hidden states and from whole logits. The losses are the reference's bits."""
    name = "linear_cross_entropy_fwd"
    for args in samples(name, dtype, *shape):
        h, weight, bias, target, pointwise, _, logits, rows, scale = args
        wide_logits = torch.nn.functional.linear(*wide((h, weight, bias))) if logits is None else logits.double()
        terms = sum_terms(wide_logits if rows is None else wide_logits[rows], pointwise)
        oracle = (*wide((h, weight, bias, target, pointwise)), torch.float64, *wide((logits, rows, scale)))
        assert_lawful(name, args, oracle, [terms, None, terms, None])
        assert_equal_bits(present(run(name, args))[:1], present(specified(name, args))[:1])


@every_dtype
@every_shape
def test_bwd(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples("linear_cross_entropy_bwd", dtype, *shape):
        assert_lawful("linear_cross_entropy_bwd", args, wide(args), [None] * 3)


def arguments(rows: int = 6, columns: int = 40) -> tuple[Any, ...]:
    y = torch.randn(rows, columns, device=DEVICE) * 3
    # the first targets lie in columns 100 to 139 of the vocabulary
    target = torch.arange(rows, device=DEVICE) * 37 + 90
    return y, target, 100, y.amax(1) + 1, torch.rand(rows, device=DEVICE), torch.rand(rows, device=DEVICE)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "part"])
@pytest.mark.parametrize("in_place", [True, False])
def test_grad_of_a_chunk(layout: str, in_place: bool) -> None:
    y, *rest = arguments()
    if layout == "transposed":
        y = y.t().contiguous().t()
    if layout == "part":
        y = torch.cat([y, y], 1)[:, :40]
    expected = reference._softmax_grad(y.clone(), *rest, False)
    before = y.clone()
    dy = kernel._softmax_grad(y, *rest, in_place)
    assert (dy.data_ptr() == y.data_ptr()) == (in_place and layout == "contiguous")
    assert dy is y or torch.equal(y, before)
    # the softmax has a few roundings
    torch.testing.assert_close(dy, expected, rtol=8 * torch.finfo(torch.float32).eps, atol=2**-24)


@pytest.mark.parametrize("end", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_numbers_that_are_none(end: float) -> None:
    logits = torch.randn(4, 16, device=DEVICE)
    # in the first column, in the last one, and in a whole row
    logits[0, 0] = logits[1, 15] = end
    logits[2] = end
    log_probabilities = torch.log_softmax(logits, 1)
    (maximum, log_sum), (maximum_, log_sum_) = (
        of(logits, log_probabilities) for of in (kernel.statistics, reference._row_statistics)
    )
    torch.testing.assert_close(log_sum + maximum, log_sum_ + maximum_, rtol=1e-6, atol=0, equal_nan=True)
