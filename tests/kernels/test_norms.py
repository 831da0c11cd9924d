"""RMSNorm's kernels against the reference and fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.harness import DTYPES, SHAPES, check, present, run, samples, specified

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@every_dtype
@every_shape
@pytest.mark.parametrize("name", ["rms_norm_fwd", "rms_norm_rebuild"])
def test_rms_norm_values_are_the_references(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples(name, dtype, *shape):
        check(name, args, bitwise=True)


def rms_norm_terms(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, variant: str, needed: Any
) -> list[Tensor | None]:
    gain = torch.ones(()) if weight is None else 1 + weight if variant == "one_plus_weight" else weight
    direct = (dy * gain * rstd).abs()
    through = (direct * x.abs()).mean(-1, keepdim=True) * rstd**2 * x.abs()
    return [direct + through, (dy * x * rstd).abs().sum(0)]


@every_dtype
@every_shape
def test_rms_norm_bwd(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples("rms_norm_bwd", dtype, *shape):
        check("rms_norm_bwd", args, rms_norm_terms)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (False, False)])
def test_rms_norm_bwd_returns_what_is_needed(needed: tuple[bool, bool]) -> None:
    for *args, _ in samples("rms_norm_bwd", torch.float32, 5, 9):
        check("rms_norm_bwd", (*args, needed), rms_norm_terms)


@pytest.mark.parametrize("name", ["rms_norm_fwd", "rms_norm_rebuild", "rms_norm_bwd"])
def test_rms_norm_of_nothing(name: str) -> None:
    for args in samples(name, torch.bfloat16, 0, 8):
        for ours, stock in zip(present(run(name, args)), present(specified(name, args)), strict=True):
            assert ours.dtype == stock.dtype and torch.equal(ours, stock)
