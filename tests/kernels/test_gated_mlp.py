"""The gated product's kernels against the reference and fp64, for every kind of activation."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.reference import ACTIVATIONS
from tests.kernels.harness import DTYPES, check, run, samples
from tests.oracle import assert_equal_bits

every_name = pytest.mark.parametrize("name", ["gated_product", "gated_product_bwd"])


@every_name
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind(name: str, dtype: torch.dtype) -> None:
    kinds = set()
    for args in samples(name, dtype, 3, 1367):
        check(name, args)
        kinds.add(next(arg for arg in args if isinstance(arg, str)))
    assert kinds == set(ACTIVATIONS)


@every_name
def test_halves_of_one_projection_are_read_where_they_are(name: str) -> None:
    from hf_actcompress.kernels.common import as_rows

    args = list(next(samples(name, torch.bfloat16, 5, 96)))
    first = 0 if name == "gated_product" else 1
    both = torch.cat(args[first : first + 2], dim=-1)
    dense = run(name, args)
    args[first : first + 2] = both.chunk(2, dim=-1)
    assert not args[first].is_contiguous()
    assert as_rows(args[first]).data_ptr() == both.data_ptr()
    assert_equal_bits(run(name, args), dense)
