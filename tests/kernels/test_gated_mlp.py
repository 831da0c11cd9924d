"""The gated product's kernels on views; test_activation.py compares them with the reference for every activation."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.harness import DTYPES, run, samples
from tests.oracle import assert_equal_bits


@pytest.mark.parametrize("name", ["gated_product", "gated_product_and_bwd", "gated_product_bwd"])
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


@pytest.mark.daily(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("owned", [False, True])
def test_product_and_gradients_in_one_pass_have_the_bits_of_two(dtype: torch.dtype, owned: bool) -> None:
    for rows, width in ((1, 1), (37, 129)):
        for dh, gate, up, stock, kind, options, out, _ in samples("gated_product_and_bwd", dtype, rows, width):
            expected = run("gated_product", (gate, up, stock, kind, options, out))
            expected += run("gated_product_bwd", (dh, gate, up, stock, kind, options))
            before, where = dh.clone(), dh.data_ptr()
            ours = run("gated_product_and_bwd", (dh, gate, up, stock, kind, options, out, owned))
            assert_equal_bits(ours, expected)
            # the product overwrites dh only if the caller no longer needs it (`owned`)
            assert (ours[0].data_ptr() == where) is owned  # type: ignore[union-attr]
            assert owned or torch.equal(dh, before)


def test_a_gradient_in_another_layout_or_dtype_is_left_alone() -> None:
    dh, gate, up, *rest, _ = next(samples("gated_product_and_bwd", torch.bfloat16, 6, 8))
    for given in (dh.t().contiguous().t(), dh[:1].expand(6, 8), dh.float()):
        before = given.clone()
        h, *_ = run("gated_product_and_bwd", (given, gate, up, *rest, True))
        assert torch.equal(given, before) and h is not None and h.data_ptr() != given.data_ptr()
