"""The gated product's kernels on views; test_activation.py holds them to the reference, for every activation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import run, samples
from tests.oracle import assert_equal_bits


@pytest.mark.parametrize("name", ["gated_product", "gated_product_bwd"])
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
