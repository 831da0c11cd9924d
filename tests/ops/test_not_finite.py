"""NaN and inf in what a method keeps: where stock's gradient is not finite, ours is not, and NaN stays NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_actcompress import ops
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.config_checks import VARIANTS
from hf_actcompress.dispatch import use
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.norm_output.op import layer_norm_output, rms_norm_output
from hf_actcompress.methods.tempo.op import attention_tempo
from hf_actcompress.modules.base import FoundWith
from hf_actcompress.modules.leaves import ACTIVATION_OPS, ActivationSettings
from hf_actcompress.reference import ACTIVATIONS
from hf_actcompress.roles import Role
from tests.oracle import gradients

BAD = (float("nan"), float("inf"), float("-inf"))
# with kernels, which the interpreter runs slowly, only one row for each way to keep something
IN_KERNELS = ("input", "output", "derivative", "steps3", "values4", "values8")
IN_KERNELS += ("topk10", "topk30", "block30", "block30_row", "wtacrs30", "pool2")
# it has the stock forward and the options of each row
activation = pytest.importorskip("hf_actcompress.kernels.activation", exc_type=ImportError)
Op = Callable[..., Tensor]


def assert_lost_nowhere(ours: list[Tensor], stock: list[Tensor]) -> None:
    for a, b in zip(ours, stock, strict=True):
        assert bool(a[b.isnan()].isnan().all()), "a NaN of stock's became a number"
        assert not bool(a[~b.isfinite()].isfinite().any()), "an inf of stock's became finite"


NORMS: dict[str, tuple[Op, Op]] = {
    "layer_norm_output": (
        lambda x, w, b: layer_norm_output(x, (6,), w, b),
        lambda x, w, b: functional.layer_norm(x, (6,), w, b),
    ),
    "rms_norm_output": (
        lambda x, w, b: rms_norm_output(x, w, 1e-6) + b,
        lambda x, w, b: w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)) + b,
    ),
}


def rows(names: Iterable[str]) -> pytest.MarkDecorator:
    """Pairs of a name and an implementation."""
    names = list(names)
    reference, kernels = ([(name, choice) for name in names] for choice in ("reference", "triton"))
    return pytest.mark.parametrize(
        ("name", "choice"), reference + [row for row in kernels if row[0] in (*IN_KERNELS, *NORMS)]
    )


@pytest.mark.daily(3)
@rows(VARIANTS["activation_variant"])
def test_activations(name: str, choice: str) -> None:
    keep, tried = ACTIVATION_OPS[name], 0
    for kind in ACTIVATIONS:
        stock, options = activation.STOCKS[kind], activation.OPTIONS.get(kind, ())
        settings = ActivationSettings(Role.ACTIVATION, kind, keeps=name, attributes=(), found_with=FoundWith(()))
        op = partial(keep, stock=stock, c=options, s=settings)
        for bad in (*BAD, -300.0):
            x = torch.tensor([0.25, bad, -1.0], requires_grad=True)
            try:
                with use(choice):
                    ours = gradients(op, [x])
            except UnknownOptionError:
                # this row has no table
                continue
            expected = gradients(stock, [x])
            assert_lost_nowhere(ours, expected)
            if bool(expected[1].isfinite().all()):
                assert bool(ours[1].isfinite().all()), f"{kind} of {bad}"
            tried += 1
    assert tried >= 8


@rows(NORMS)
def test_norms(name: str, choice: str) -> None:
    for bad in BAD:
        inputs = [torch.randn(4, 6), torch.ones(6), torch.zeros(6)]
        inputs[0][2, 3] = bad
        inputs = [x.requires_grad_() for x in inputs]
        ours, stock = NORMS[name]
        with use(choice):
            assert_lost_nowhere(gradients(ours, inputs), gradients(stock, inputs))


@pytest.mark.parametrize("bad", BAD)
def test_tempo_attention(bad: float) -> None:
    for place in range(3):
        qkv = [torch.randn(1, 2, 5, 4) for _ in range(3)]
        qkv[place][0, 1, 2, 3] = bad
        qkv = [x.requires_grad_() for x in qkv]
        ours = gradients(lambda q, k, v: attention_tempo(q, k, v, None, 0.5)[0], qkv)
        assert_lost_nowhere(ours, gradients(lambda q, k, v: torch.softmax(q @ k.mT * 0.5, -1) @ v, qkv))


# which elements of x [40, 64] are not finite: one, a token, a feature, several far apart, all
PLACES = {
    "one": (7, 11),
    "token": (7, slice(None)),
    "feature": (slice(None), 50),
    "some": ([3, 5, 39, 20], [1, 40, 63, 33]),
    "all": (slice(None), slice(None)),
}


@pytest.mark.daily(4)
@rows(name for name, codec in CODECS.items() if not codec.for_images)
def test_inputs_of_linear_layers(name: str, choice: str) -> None:
    for place in PLACES.values():
        for bad in BAD:
            x, weight = torch.randn(1, 40, 64), torch.randn(3, 64, requires_grad=True)
            x[0][place] = bad
            x.requires_grad_()
            with use(choice):
                ours = gradients(partial(ops.linear, codec=CODECS[name], derive=False), [x, weight])
            assert_lost_nowhere(ours, gradients(functional.linear, [x, weight]))


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.for_images])
@pytest.mark.parametrize("bad", BAD)
def test_inputs_of_convolutions(name: str, bad: float) -> None:
    x, weight = torch.randn(1, 2, 7, 9), torch.randn(3, 2, 1, 1, requires_grad=True)
    x[0, 1, 6, 8] = bad
    x.requires_grad_()
    op = partial(ops.conv2d, bias=None, geometry=((1, 1), (0, 0), (1, 1), 1), codec=CODECS[name], derive=False)
    assert_lost_nowhere(gradients(op, [x, weight]), gradients(functional.conv2d, [x, weight]))
