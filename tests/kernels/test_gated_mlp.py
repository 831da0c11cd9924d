"""The gated product's kernels against the reference and fp64, for every kind of activation."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.reference import ACTIVATIONS
from tests.kernels.harness import DTYPES, check, samples

every_name = pytest.mark.parametrize("name", ["gated_product", "gated_product_bwd"])


@every_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind(name: str, dtype: torch.dtype) -> None:
    kinds = set()
    for args in samples(name, dtype, 3, 1367):
        check(name, args)
        kinds.add(next(arg for arg in args if isinstance(arg, str)))
    assert kinds == set(ACTIVATIONS)
