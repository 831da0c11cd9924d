"""Kernels of activations in a forward: a form is used if it has stock's bits for all inputs, and refused otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import activations as hf

from hf_actcompress import dispatch, reference
from hf_actcompress.dispatch import implementation, use
from hf_actcompress.kernels import TORCH_HAS, activation_forward
from hf_actcompress.kernels.activation_forward import COMPOSED, FORMS, Form, launch, shown_form
from hf_actcompress.kernels.probe import NARROW, differing, every, identity, paired
from hf_actcompress.methods.derivative.op import activation_derivative
from hf_actcompress.reference.table import FUNCTIONS
from tests.kernels.harness import DEVICE, check, launched, moved, run, samples, specified
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(6)

every_dtype = pytest.mark.parametrize("dtype", NARROW, ids=str)


@pytest.fixture(autouse=True)
def _nothing_shown() -> Iterator[None]:
    activation_forward.forget()
    yield
    activation_forward.forget()


def rounding(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that rounds fp32 numbers to that dtype and returns them in fp32."""
    return lambda x: x.to(dtype).float()


def in_fp64(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """exp, tanh or erf of fp32 numbers as Triton's interpreter computes it: in fp64, then rounded once to fp32."""
    return function(x.double()).float()


def emulated(name: str, x: Tensor, out: torch.dtype) -> Tensor:
    """Compute a form in torch's fp32, with a rounding after each of stock's ops."""
    r, w, f = rounding(x.dtype), rounding(out), x.float()
    if name == "silu":
        return (f / (1 + in_fp64(torch.exp, -f))).to(out)
    if name == "gelu":
        return (f * 0.5 * (1 + in_fp64(torch.erf, f * 0.7071067811865476))).to(out)
    if name == "gelu_tanh":
        inner = 0.7978845608028654 * (f + 0.044715 * (f * f * f))
        return (0.5 * f * (1 + in_fp64(torch.tanh, inner))).to(out)
    if name == "quick_gelu":
        return (f * r(1 / (1 + in_fp64(torch.exp, -r(f * 1.702))))).to(out)
    if name == "gelu_fast":
        inner = r(r(f * 0.7978845608) * r(1 + r(r(0.044715 * f) * f)))
        return (r(0.5 * f) * r(1 + r(in_fp64(torch.tanh, inner)))).to(out)
    square = w(f * f) if name == "gelu_new" else f * f
    inner = w(0.7978845608028654 * w(f + w(0.044715 * w(square * f))))
    return (r(0.5 * f) * w(1 + w(in_fp64(torch.tanh, inner)))).to(out)


@every_dtype
@pytest.mark.parametrize("name", [name for forms in FORMS.values() for name, fused in forms if not fused])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.skipif(DEVICE.type == "cuda", reason="of the interpreter's functions")
def test_forms_round_after_each_op(name: str, dtype: torch.dtype, wide: bool) -> None:
    """All inputs are compared. The interpreter computes exp and tanh in fp64, so the emulation does too."""
    if wide and not name.startswith("gelu_new"):
        return
    out = torch.float32 if wide else dtype
    x, up = paired(dtype, DEVICE, 1)
    form = Form(name, False, out, out)
    y = launch([x.view(1, -1)], form, torch.empty(x.shape, dtype=out), x.numel())
    # the kernel's tanh, from exp(2x), and torch's differ in fp64's last bits, which sometimes changes the fp32 result
    assert differing(y, emulated(name, x, out)) <= (65 if wide else 0)
    product = launch([x.view(1, -1), up.view(1, -1)], form, torch.empty_like(y), x.numel())
    assert differing(product, y * up) == 0


STOCKS: dict[str, tuple[str, Any]] = {
    "gelu_new": ("gelu_new", partial(hf.NewGELUActivation.forward, hf.NewGELUActivation())),
    "gelu_accurate": ("gelu_new", partial(hf.AccurateGELUActivation.forward, hf.AccurateGELUActivation())),
    "gelu_python_tanh": ("gelu_new", partial(hf.GELUTanh.forward, hf.GELUTanh(use_gelu_tanh_python=True))),
    "gelu_fast": ("gelu_new", partial(hf.FastGELUActivation.forward, hf.FastGELUActivation())),
    "quick_gelu": ("quick_gelu", partial(hf.QuickGELUActivation.forward, hf.QuickGELUActivation())),
    "silu": ("silu", functional.silu),
}


@every_dtype
@pytest.mark.parametrize("name", STOCKS)
@pytest.mark.parametrize("gated", [False, True])
def test_stock_functions_that_are_shown(name: str, dtype: torch.dtype, gated: bool) -> None:
    kind, stock = STOCKS[name]
    form = shown_form(stock, kind, dtype, DEVICE, gated)
    assert form is not None and form.out == dtype
    assert form.name == name if name in ("gelu_fast", "quick_gelu", "silu") else form.name.startswith("gelu_new")


@every_dtype
def test_one_wrong_value_is_refused(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One of 65,536 results is wrong: its last bit, a number in the place of NaN, or the sign of a zero."""
    x = torch.randn(3, 40, dtype=dtype, device=DEVICE)
    for at in (0x3F81, 0x7FFF, 0x8000):
        activation_forward.forget()

        def wrong(matrices: list[Tensor], form: Form, h: Tensor, tile: int = 2048, at: int = at) -> Tensor:
            bits = launch(matrices, form, h, tile).view(torch.int16)
            bits[(matrices[0].view(torch.int16) == every(dtype, DEVICE)[at].view(torch.int16)).view(bits.shape)] ^= (
                0x4000 if at == 0x7FFF else -0x8000 if at == 0x8000 else 1
            )
            return h

        monkeypatch.setattr(activation_forward, "launch", wrong)
        with caplog.at_level(logging.WARNING, logger="hf_actcompress"), use("triton"):
            for name, args in (("activation_fwd", (x,)), ("gated_product_fwd", (x, x))):
                kind, stock = STOCKS["quick_gelu"]
                # the form is refused, and stock's ops run
                ours = implementation(name, x, kind)(*args, stock, kind)
                assert_equal_bits([ours], [FUNCTIONS[name](*args, stock, kind)])
        assert "1 of 65536 results differ" in caplog.text and "stock's ops run" in caplog.text
    assert dispatch._module("activation_fwd").PROOFS["activation_fwd"]("quick_gelu", DEVICE) is not None


@every_dtype
@pytest.mark.parametrize("name", ["activation_fwd", "gated_product_fwd"])
def test_bits_and_layouts(name: str, dtype: torch.dtype) -> None:
    for rows, width in ((1, 1), (37, 129), (3, 2500)):
        for args in samples(name, dtype, rows, width):
            check(name, args, bitwise=True)


def test_views_are_read_where_they_are() -> None:
    kind, stock = STOCKS["silu"]
    both = torch.randn(2, 5, 192, dtype=torch.bfloat16, device=DEVICE)
    gate, up = both.chunk(2, dim=-1)
    args = gate, up, stock, kind
    ours = run("gated_product_fwd", args)
    assert_equal_bits(ours, specified("gated_product_fwd", args))
    assert ours[0].stride() == (stock(gate) * up).stride()  # type: ignore[union-attr]
    assert moved("gated_product_fwd", *args) == 3 * gate.numel() * 2
    # for another layout stock's result has another layout too, so stock's ops run
    assert moved("activation_fwd", both.transpose(0, 1), *reversed(STOCKS["gelu_new"])) == 0
    swapped = both.transpose(1, 2)
    (ours,) = run("gated_product_fwd", (swapped, swapped, stock, kind))
    assert ours.stride() == (stock(swapped) * swapped).stride()  # type: ignore[union-attr]


def test_what_is_not_known_is_not_believed() -> None:
    scale = 2.0
    module = hf.QuickGELUActivation()
    assert identity(lambda x: x * scale) is None and identity(module) is None
    assert identity(partial(functional.gelu, approximate="tanh")) != identity(functional.gelu)
    assert identity(partial(hf.QuickGELUActivation.forward, module)) == identity(STOCKS["quick_gelu"][1])
    assert identity(torch.tanh) == torch.tanh
    # a function that is not of the named kind is refused, because no form has its bits
    assert shown_form(lambda x: torch.sigmoid(1.75 * x) * x, "quick_gelu", torch.bfloat16, DEVICE, False) is None
    with use("triton"):
        x = torch.randn(8, device=DEVICE)
        assert_equal_bits(
            [implementation("activation_fwd", x)(x, *reversed(STOCKS["gelu_new"]))], [STOCKS["gelu_new"][1](x)]
        )


def test_under_autocast_a_form_of_its_own_is_shown() -> None:
    """Under autocast a GPU computes torch.pow in fp32 and a CPU does not, so the form may be another one."""
    kind, stock = STOCKS["gelu_new"]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        x = torch.randn(3, 40, dtype=torch.bfloat16, device=DEVICE)
        args = x, stock, kind
        assert_equal_bits(run("activation_fwd", args), specified("activation_fwd", args))
        form = shown_form(stock, kind, x.dtype, DEVICE, False)
    assert form is not None and form.out == stock_dtype(stock, x)
    assert len(activation_forward._forms) == 1
    assert shown_form(stock, kind, x.dtype, DEVICE, False) is not None
    assert len(activation_forward._forms) == 2


def stock_dtype(stock: Callable[[Tensor], Tensor], x: Tensor) -> torch.dtype:
    with torch.autocast(DEVICE.type, torch.bfloat16):
        return stock(x).dtype


def test_every_activation_has_a_place() -> None:
    kinds = set(reference.ACTIVATIONS)
    assert kinds - TORCH_HAS["activation_fwd"] == set(COMPOSED)
    assert kinds - TORCH_HAS["gated_product_fwd"] == set(FORMS)


MOVED = {
    ("activation_fwd", "gelu_new"): 2,
    ("activation_fwd", "quick_gelu"): 2,
    ("gated_product_fwd", "silu"): 3,
    ("gated_product", "silu"): 3,
    ("gated_product_and_bwd", "silu"): 6,
    ("gated_product_bwd", "silu"): 5,
}


@pytest.mark.parametrize(("name", "kind"), MOVED)
def test_bytes_moved(name: str, kind: str) -> None:
    args = next(args for args in samples(name, torch.bfloat16, 3, 200) if kind in args)
    assert moved(name, *args) == MOVED[name, kind] * 600 * 2


def test_variant_that_keeps_the_derivative_makes_two_passes() -> None:
    x, stock, kind = next(args for args in samples("activation_fwd", torch.bfloat16, 3, 200) if "quick_gelu" in args)
    # the first call tries the form
    run("activation_fwd", (x, stock, kind))
    with use("triton"), launched() as launches:
        y = activation_derivative(x.clone().requires_grad_(), stock, kind)
    assert sorted(name for name, _ in launches) == ["_activation_kernel", "_fwd_kernel"]
    assert_equal_bits([y.detach()], [stock(x)])
