"""The norms' kernels against the reference and fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.harness import check, every_case, present, run, samples, specified
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(3)

Case = tuple[torch.dtype, int, int]
Terms = list[Tensor | None]


@every_case
@pytest.mark.parametrize("name", ["rms_norm_fwd", "rms_norm_rebuild"])
def test_rms_norm_values_are_the_references(name: str, case: Case) -> None:
    for args in samples(name, *case):
        check(name, args, bitwise=True)


def norm_terms(dnormed: Tensor, dy: Tensor, normed: Tensor, rstd: Tensor, centred: bool = True) -> Terms:
    """Of dx, dweight and dbias."""
    direct = dnormed.abs()
    dx = direct + (direct * normed.abs()).mean(-1, keepdim=True) * normed.abs()
    if centred:
        dx = dx + direct.mean(-1, keepdim=True)
    return [dx * rstd, (dy * normed).abs().sum(0), dy.abs().sum(0)]


def gain_of(weight: Tensor | None, variant: str = "") -> Tensor:
    if weight is None:
        return torch.ones((), dtype=torch.float64)
    return 1 + weight if variant == "one_plus_weight" else weight


def rms_norm_terms(dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: str, needed: Any) -> Terms:
    return norm_terms(dy * gain_of(weight, variant), dy, x * rstd, rstd, centred=False)[:2]


def layer_norm_terms(
    dy: Tensor, x: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Any, needed: Any
) -> Terms:
    # a rounding of x - mean is one of the larger of the two
    normed = (x.abs() + mean.abs()) * rstd
    return norm_terms(dy * gain_of(weight), dy, normed, rstd)


def layer_norm_output_terms(
    dy: Tensor, y: Tensor, shape: Any, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, needed: Any
) -> Terms:
    gain = gain_of(weight)
    normed = (y.abs() + (0 if bias is None else bias.abs())) / torch.where(gain == 0, 1.0, gain).abs()
    return norm_terms(dy * gain, dy, normed.clamp(max=y.size(-1) ** 0.5), rstd)


def rms_norm_output_terms(
    dy: Tensor, y: Tensor, weight: Tensor | None, rstd: Tensor, variant: str, needed: Any
) -> Terms:
    gain = gain_of(weight, variant)
    normed = (y / torch.where(gain == 0, 1.0, gain)).abs().clamp(max=y.size(-1) ** 0.5)
    return norm_terms(dy * gain, dy, normed, rstd, centred=False)[:2]


TERMS = {
    "layer_norm_bwd": layer_norm_terms,
    "layer_norm_output_bwd": layer_norm_output_terms,
    "rms_norm_bwd": rms_norm_terms,
    "rms_norm_output_bwd": rms_norm_output_terms,
}
every_backward = pytest.mark.parametrize("name", TERMS)


@every_case
@every_backward
def test_backward(name: str, case: Case) -> None:
    for args in samples(name, *case):
        check(name, args, TERMS[name])


# wider than the registers: tiles of two rows and a block that is not full, two tiles of one program
WIDE = 8200


@every_backward
def test_backward_of_wide_rows(name: str) -> None:
    for args in list(samples(name, torch.float32, 7, WIDE))[:2]:
        check(name, args, TERMS[name])


@pytest.mark.parametrize("width", [9, WIDE])
@every_backward
def test_backward_returns_what_is_needed(name: str, width: int) -> None:
    *args, needed = next(
        args for args in samples(name, torch.float32, 5, width) if all(args[-1]) and all(x is not None for x in args)
    )
    everything = run(name, (*args, needed))
    for wanted in range(2 ** len(needed)):
        bits = tuple(bool(wanted >> i & 1) for i in range(len(needed)))
        assert [x is not None for x in specified(name, (*args, bits))] == [
            x is not None for x in run(name, (*args, bits))
        ]
        for x, y in zip(run(name, (*args, bits)), everything, strict=True):
            assert x is None or y is None or torch.equal(x, y)


@pytest.mark.parametrize("name", ["rms_norm_fwd", *TERMS])
def test_a_row_too_wide_for_a_kernel_is_the_references(name: str) -> None:
    args = next(samples(name, torch.float32, 2, 16385))
    assert_equal_bits(present(run(name, args)), present(specified(name, args)))


def test_layer_norm_over_two_dimensions() -> None:
    dy, x, _, mean, rstd, weight, bias, needed = next(samples("layer_norm_bwd", torch.float32, 5, 12))
    shape = (3, 4)
    dy, x, weight, bias = dy.view(5, *shape), x.view(5, *shape), weight.view(shape), bias.view(shape)
    args = (dy, x, shape, mean[..., None], rstd[..., None], weight, bias, needed)
    for ours, stock in zip(run("layer_norm_bwd", args), specified("layer_norm_bwd", args), strict=True):
        torch.testing.assert_close(ours, stock)
