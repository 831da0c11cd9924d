"""The kernels that take an activation as an argument, against the reference and fp64, for every activation."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.reference import ACTIVATIONS
from tests.kernels.harness import DTYPES, check, samples

pytestmark = pytest.mark.daily(6)

NAMES = (
    "activation_bwd",
    "activation_derivative",
    "activation_value",
    "gated_product",
    "gated_product_and_bwd",
    "gated_product_bwd",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind(name: str, dtype: torch.dtype) -> None:
    # more than one tile, and enough elements for a meaningful norm of the error
    kinds = set()
    for args in samples(name, dtype, 3, 8191):
        check(name, args)
        kinds.add(next(arg for arg in args if isinstance(arg, str)))
    assert kinds == set(ACTIVATIONS)
