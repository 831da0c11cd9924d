"""Tempo: LayerNorm and RMSNorm whose backward reads their outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_actcompress import ops
from hf_actcompress.methods.norm_output.op import layer_norm_output, rms_norm_output
from hf_actcompress.methods.norm_output.reference import layer_norm_output_reasons, rms_norm_output_reasons
from hf_actcompress.records import frame
from hf_actcompress.reference import RMS_NORM_FORMULAS, rms_norm_fwd
from tests.oracle import gradients, kept_bytes, nbytes, pattern

ROWS, WIDTH = 96, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def norm_inputs(dtype: torch.dtype, gain: Tensor | None = None, bias: Tensor | None = None) -> list[Tensor]:
    gain = 1 + 0.1 * torch.randn(WIDTH) if gain is None else gain
    bias = 0.1 * torch.randn(WIDTH) if bias is None else bias
    x = 2 * torch.randn(ROWS, WIDTH) + 0.5
    return [t.clone().to(dtype).requires_grad_() for t in (x, gain, bias)]


def stock_layer_norm(x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.layer_norm(x, (WIDTH,), gain, bias, 1e-5)


def our_layer_norm(x: Tensor, gain: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return layer_norm_output(x, (WIDTH,), gain, bias, 1e-5)


def relative(ours: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]


def oracle(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Gradients in fp64, for the same incoming gradient."""
    dy = pattern(function(*inputs))
    return gradients(function, [t.detach().double().requires_grad_() for t in inputs], dy.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parameters", [0, 1, 2])
def test_layer_norm(dtype: torch.dtype, parameters: int) -> None:
    inputs = norm_inputs(dtype)[: 1 + parameters]
    ours, stock = gradients(our_layer_norm, inputs), gradients(stock_layer_norm, inputs)
    assert torch.equal(ours[0], stock[0])
    exact = oracle(stock_layer_norm, inputs)[1:]
    for error, own in zip(relative(ours[1:], exact), relative(stock[1:], exact), strict=True):
        # ours has one more rounding than stock, that of y
        assert error < own + torch.finfo(dtype).eps / 2


def test_layer_norm_in_fp64_is_the_same_function() -> None:
    inputs = norm_inputs(torch.float64)
    for a, b in zip(gradients(our_layer_norm, inputs), gradients(stock_layer_norm, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_layer_norm_over_two_dimensions() -> None:
    x = torch.randn(5, 4, 6, dtype=torch.float64, requires_grad=True)
    gain, bias = (torch.rand(4, 6, dtype=torch.float64) + 0.5).requires_grad_(), torch.ones(4, 6).double()
    ours = gradients(lambda x, g: layer_norm_output(x, (4, 6), g, bias), [x, gain])
    stock = gradients(lambda x, g: functional.layer_norm(x, (4, 6), g, bias), [x, gain])
    for a, b in zip(ours, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_channels_that_cannot_be_inverted_are_named() -> None:
    gain, bias = 1 + 0.1 * torch.randn(WIDTH), 0.3 * torch.ones(WIDTH)
    assert layer_norm_output_reasons(gain, bias) == []
    assert layer_norm_output_reasons(None, None) == []
    gain[3] = 1e-2
    assert layer_norm_output_reasons(gain, bias) == ["1 of 64 channels have |bias / weight| > 10 (largest 30)"]
    gain[4] = -1e-5
    small, ratio = layer_norm_output_reasons(gain, bias)
    assert small == "1 of 64 channels have |weight| < 0.001" and ratio.startswith("2 of 64")
    gain[4] = 0.0
    assert len(layer_norm_output_reasons(gain, bias)) == 2
    assert rms_norm_output_reasons(torch.tensor([1.0, -1e-4]), "weight_after_cast") != []
    assert rms_norm_output_reasons(torch.zeros(4), "one_plus_weight") == []
    assert rms_norm_output_reasons(-torch.ones(4), "one_plus_weight") != []
    assert rms_norm_output_reasons(None, "weight_in_fp32") == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_guard_lets_pass_is_accurate_and_what_it_stops_is_not(dtype: torch.dtype) -> None:
    gain, bias = torch.ones(WIDTH), 0.3 * torch.ones(WIDTH)
    gain[:3] = 0.031  # |bias / weight| just under the limit
    assert layer_norm_output_reasons(gain, bias) == []
    inputs = norm_inputs(dtype, gain, bias)
    exact = oracle(stock_layer_norm, inputs)
    dx, dgain, _ = relative(gradients(our_layer_norm, inputs)[1:], exact[1:])
    eps = torch.finfo(dtype).eps
    assert dx < 1.5 * eps and dgain < 2.5 * eps

    gain[:3] = 1e-3
    assert layer_norm_output_reasons(gain, bias) != []
    inputs = norm_inputs(dtype, gain, bias)
    exact = oracle(stock_layer_norm, inputs)
    worst = [
        ((g.double() - exact[2])[:3].norm() / exact[2][:3].norm()).item()
        for g in (gradients(our_layer_norm, inputs)[2], gradients(stock_layer_norm, inputs)[2])
    ]
    assert worst[0] > 20 * worst[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gains_that_became_zero_stay_finite(dtype: torch.dtype) -> None:
    for value in (0.0, 1e-30):
        x, gain, bias = norm_inputs(dtype)
        with torch.no_grad():
            gain[5] = value
        grads = gradients(our_layer_norm, [x, gain, bias])
        assert all(g.isfinite().all() for g in grads)
        expected = gradients(stock_layer_norm, [x, gain, bias])
        # x^ of the dead channel is bounded, and the other channels are as exact as without it
        others = torch.arange(WIDTH) != 5
        assert (grads[2] - expected[2])[others].norm() <= 4 * torch.finfo(dtype).eps * expected[2].norm()
        assert all(g.isfinite().all() for g in gradients(_rms("weight_in_fp32"), [x, gain]))


def _rms(formula: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: rms_norm_output(x, weight, 1e-6, formula)


def _stock_rms(formula: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, weight: rms_norm_fwd(x, weight, 1e-6, formula)[0]


@pytest.mark.parametrize("formula", RMS_NORM_FORMULAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(formula: str, dtype: torch.dtype) -> None:
    # gains differ by two orders of magnitude, which does no harm without a bias
    shift = 1.0 if formula == "one_plus_weight" else 0.0
    weight = torch.randn(WIDTH).exp() * torch.where(torch.arange(WIDTH) % 20 == 0, 2e-3, 1.0) - shift
    inputs = norm_inputs(dtype, gain=weight)[:2]
    if shift:
        # no weight is near -1, where 1 + w would not be exact
        inputs[1] = (torch.randn(WIDTH) / 8).to(dtype).requires_grad_()
    ours = gradients(_rms(formula), inputs)
    stock = gradients(_stock_rms(formula), inputs)
    assert torch.equal(ours[0], stock[0])
    exact = oracle(_stock_rms(formula), inputs)
    eps = torch.finfo(dtype).eps
    for ours_error, own in zip(relative(ours[1:], exact[1:]), relative(stock[1:], exact[1:]), strict=True):
        # y carries up to three roundings (x^, weight, product) that x does not
        assert ours_error < own + 1.5 * eps


def test_rms_norm_in_fp64_is_the_same_function() -> None:
    inputs = norm_inputs(torch.float64)[:2]
    for formula in RMS_NORM_FORMULAS:
        for a, b in zip(gradients(_rms(formula), inputs), gradients(_stock_rms(formula), inputs), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
    x = inputs[:1]
    ours = gradients(lambda x: rms_norm_output(x, None, 1e-6), x)
    stock = gradients(lambda x: rms_norm_fwd(x, None, 1e-6, "weight_after_cast")[0], x)
    torch.testing.assert_close(ours[1], stock[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_and_linear_keep_one_tensor_between_them(dtype: torch.dtype) -> None:
    x, gain, bias = norm_inputs(dtype)
    weight = torch.randn(WIDTH, WIDTH).to(dtype).requires_grad_()
    sources = [lambda: our_layer_norm(x.clone(), gain, bias), lambda: rms_norm_output(x.clone(), gain, 1e-6)]
    for norm in sources:

        def block(norm: Callable[[], Tensor] = norm) -> Tensor:
            with frame():
                y = norm()
                return ops.linear(y, weight) + ops.linear(y, weight)

        assert nbytes(x) < kept_bytes(block) <= nbytes(x) + ROWS * 4


def test_a_cast_of_the_kept_output_is_derived_from_it() -> None:
    """Under autocast the linear layer reads a narrower copy of y; it is cast again instead of kept beside y."""
    x, gain, bias = norm_inputs(torch.float32)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def block() -> Tensor:
        with frame(), torch.autocast("cpu", dtype=torch.bfloat16):
            return ops.linear(our_layer_norm(x.clone(), gain, bias), weight)

    assert kept_bytes(block) == nbytes(x) + ROWS * 4
