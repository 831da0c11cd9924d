"""Single ops with any shape, with mixed dtypes, under autocast, and one after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_actcompress import ops
from tests.ops.contract_case import DTYPES, rand, size
from tests.oracle import assert_equal_bits, gradients, kept_bytes

few = settings(max_examples=15, deadline=None, derandomize=True, database=None)
sizes = st.integers(1, 33)


@few
@given(batch=sizes, rows=sizes, width=sizes, out=sizes, bias=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_linear_of_any_shape(batch, rows, width, out, bias, dtype):
    inputs = [rand(batch, rows, width, dtype=dtype), rand(out, width, dtype=dtype)]
    inputs.append(rand(out, dtype=dtype) if bias else None)
    assert_equal_bits(gradients(ops.linear, inputs), gradients(torch.nn.functional.linear, inputs))


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", ["linear", "deferred_linear"])
def test_products_of_rows_with_gaps_are_stocks(name: str, trained: bool) -> None:
    """Torch multiplies other shapes if the weight wants a gradient, with other roundings in fp16."""

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return getattr(ops, name)(x, weight) + 0

    for _ in range(20):
        # Mamba hands its channels over like this
        x, weight = torch.randn(3, 64, 13).transpose(1, 2).requires_grad_(), torch.randn(32, 64, requires_grad=trained)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(ours(x, weight), torch.nn.functional.linear(x, weight))


@few
@given(lead=st.lists(st.integers(1, 5), max_size=3), width=sizes, eps=st.sampled_from((1e-12, 1e-5, 1e-1)))
def test_norms_of_any_shape(lead, width, eps):
    inputs = [rand(*lead, width, dtype=torch.float32), rand(width, dtype=torch.float32)]

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return ops.layer_norm(x, (width,), weight, None, eps)

    def stock(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, (width,), weight, None, eps)

    assert_equal_bits(gradients(ours, inputs), gradients(stock, inputs))


@few
@given(shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), p=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_dropout_of_any_shape_is_the_stock_mask(shape, p, seed):
    inputs = [rand(*shape, dtype=torch.float32)]

    def run(function):
        def call(x: Tensor) -> Tensor:
            torch.manual_seed(seed)
            y = function(x, p)
            # the generator advances as in stock, and backward restores the state that it found
            return y + 0 * torch.rand(())

        return gradients(call, inputs) + [torch.rand(3)]

    assert_equal_bits(run(ops.dropout), run(torch.nn.functional.dropout))


def test_mixed_dtypes_are_an_error_as_in_stock():
    x, weight = rand(2, 4, dtype=torch.bfloat16), rand(3, 4, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.linear(x, weight)
    with pytest.raises(RuntimeError, match="dtype"):
        ops.linear(x, weight)


@pytest.mark.parametrize("wide", [False, True], ids=["bf16 input", "fp32 input"])
def test_linear_under_autocast_keeps_one_cast_for_three_consumers(wide):
    x = rand(4, 8, dtype=torch.float32 if wide else torch.bfloat16)
    weights = [rand(8, 8, dtype=torch.float32) * scale for scale in (1, 2, 3)]
    weights = [w.detach().requires_grad_() for w in weights]

    def run(linear):
        def call(x: Tensor, *weights: Tensor) -> Tensor:
            h = -x
            with torch.autocast("cpu", torch.bfloat16):
                return torch.stack([linear(h, w) for w in weights]).sum(0)

        return call

    assert_equal_bits(
        gradients(run(ops.linear), [x, *weights]), gradients(run(torch.nn.functional.linear), [x, *weights])
    )
    # the input once, in bf16; no cast copy of a weight
    assert kept_bytes(lambda: run(ops.linear)(x, *weights)) == x.numel() * 2


def test_gated_product_and_norms_under_autocast():
    def run(norm, product):
        def call(x: Tensor, up: Tensor, weight: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return product(norm(x, weight), up)

        return call

    silu = torch.nn.functional.silu
    inputs = [rand(2, 3, 8, dtype=torch.float32), rand(2, 3, 8, dtype=torch.bfloat16), rand(8, dtype=torch.float32)]
    ours = run(lambda x, w: ops.layer_norm(x, (8,), w), lambda gate, up: ops.gated_product(gate, up, silu, "silu"))
    stock = run(lambda x, w: torch.nn.functional.layer_norm(x, (8,), w), lambda gate, up: silu(gate) * up)
    assert_equal_bits(gradients(ours, inputs), gradients(stock, inputs))


def test_derived_output_costs_its_consumers_nothing():
    """A norm before q, k and v: its input is kept once for four consumers. The consumers' casts are derived, too."""
    x = rand(16, 8, dtype=torch.float32)
    weight, out = rand(8, dtype=torch.float32), rand(8, 8, dtype=torch.float32)

    def run() -> Tensor:
        h = ops.rms_norm(-x, weight, 1e-6)
        return ops.linear(h, out) + ops.linear(h, out) + ops.linear(h, out)

    assert kept_bytes(run) == size(x) + 16 * 4
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_bytes(run) == size(x) + 16 * 4
