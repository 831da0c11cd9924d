"""Few-bit derivatives: the tables are optimal, no worse than the published ones, and codes take the stated bytes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from hf_actcompress import measure_step
from hf_actcompress.config import CompressionConfig
from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.fewbit.op import activation_fewbit
from hf_actcompress.methods.fewbit.reference import FEWBIT_METHODS, TABLE_OPTIONS, fewbit_bwd, fewbit_codes
from hf_actcompress.methods.fewbit.tables import CENTRES, LEVELS, PRIMITIVE_STEPS, STEPS
from hf_actcompress.models.rules import find_site
from hf_actcompress.models.sites import Site
from hf_actcompress.modules.base import patch_instance
from hf_actcompress.reference import ACTIVATIONS, activation_bwd
from hf_actcompress.reference.bits import packed_bytes
from tests.oracle import kept_bytes

OPTIONS: dict[str, tuple[float, ...]] = {"gelu_clipped": (-10.0, 10.0), "leaky_relu": (0.01,), **TABLE_OPTIONS}
EXACT = ("relu", "relu6", "leaky_relu", "hardsigmoid")
CASES = [
    (kind, method, bits)
    for kind in ACTIVATIONS
    for method, choices in FEWBIT_METHODS.items()
    for bits in choices
    if method != "relus" or kind in PRIMITIVE_STEPS
]


def levels(x: Tensor, kind: str, method: str, bits: int) -> Tensor:
    """The values that replace f'(x)."""
    options = OPTIONS.get(kind, ())
    codes, scale = fewbit_codes(x, kind, options, bits, method)
    return fewbit_bwd(torch.ones_like(x), codes, scale, kind, options, bits, method).double()


def truth(x: Tensor, kind: str) -> Tensor:
    wide = x.double()
    return activation_bwd(torch.ones_like(wide), wide, kind, OPTIONS.get(kind, ()))


def relative(x: Tensor, kind: str, method: str, bits: int) -> float:
    expected = truth(x, kind)
    return ((levels(x, kind, method, bits) - expected).norm() / expected.norm()).item()


def objective(kind: str, method: str, bits: int, reach: float = 10.0) -> float:
    """The integral of (f' - q)^2 over [-reach, reach]."""
    x = torch.linspace(-reach, reach, 200_001)
    return (levels(x, kind, method, bits) - truth(x, kind)).square().mean().item() * 2 * reach


def test_the_published_gelu_borders_and_levels() -> None:
    # the table that fewbit ships, computed on [-100, 100] by another algorithm from one random start
    borders, table = STEPS["gelu"][3]
    published = (-2.41658, -0.71001, -0.32584, 0.0001, 0.32606, 0.71024, 2.41448)
    assert max(abs(a - b) for a, b in zip(borders, published, strict=True)) < 0.005
    published = (-0.00019, -0.08828, 0.12568, 0.37231, 0.62785, 0.87445, 1.08835, 1.00020)
    assert max(abs(a - b) for a, b in zip(table, published, strict=True)) < 0.001
    assert max(abs(a - b) for a, b in zip(STEPS["gelu"][2][0], (-0.45360, 0.0, 0.45360), strict=True)) < 0.005
    assert max(abs(a - b) for a, b in zip(STEPS["silu"][2][0], (-0.7433, 0.0, 0.7433), strict=True)) < 0.005


# the integral of (f' - q)^2 of the tables that fewbit ships
SHIPPED = {
    "gelu": {1: 0.1410, 2: 0.0448, 3: 0.0120, 4: 0.0041},
    "silu": {1: 0.2150, 2: 0.0594, 3: 0.0279, 4: 0.0054},
}


@pytest.mark.parametrize("kind", SHIPPED)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_objective_is_no_worse_than_shipped(kind: str, bits: int) -> None:
    # the integral is over all of [-100, 100], which is more than the shipped figure counts
    assert objective(kind, "steps", bits, reach=100.0) <= SHIPPED[kind][bits] * 1.003


def test_silu_at_three_bits_beats_the_shipped_table_by_a_third() -> None:
    assert objective("silu", "steps", 3, reach=100.0) < 0.65 * SHIPPED["silu"][3]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_steps_are_stationary(kind: str, bits: int) -> None:
    """At an optimum f' at a border is the mean of the two levels, unless f' jumps there."""
    borders, table = STEPS[kind][bits]
    if bits == 1 and kind in ("gelu", "gelu_tanh", "silu", "quick_gelu", "hardswish"):
        assert borders == (0.0,)
    for border, low, high in zip(borders, table, table[1:], strict=False):
        at = torch.tensor([border - 1e-3, border + 1e-3], dtype=torch.float64) + CENTRES.get(kind, 0.0)
        slopes = truth(at, kind)
        mean = (low + high) / 2
        assert slopes.min() - 2e-3 <= mean <= slopes.max() + 2e-3, f"border {border}: {slopes.tolist()}, mean {mean}"


@pytest.mark.parametrize(("kind", "method", "bits"), CASES)
def test_every_activation(kind: str, method: str, bits: int) -> None:
    x = torch.randn(100, 64) * 2
    error = relative(x, kind, method, bits)
    if kind in EXACT:
        # the difference that remains is the rounding of 0.01 or 1 / 6 to fp32
        assert error < (3e-8 if kind == "hardsigmoid" else 1e-8)
    else:
        # each bit halves the error. The largest errors are those of relu_squared, on a grid per row, and of the kinks
        # of hardswish
        assert error < {"steps": 1.4, "values": 1.0, "relus": 1.7}[method] / 2**bits


# bounds of the relative L2 error of f' for x ~ N(0, 1), as in the docstring
TABLE = {
    ("steps", 1): (0.325, 0.425),
    ("steps", 2): (0.145, 0.153),
    ("steps", 3): (0.088, 0.106),
    ("steps", 4): (0.044, 0.051),
    ("values", 2): (0.145, 0.152),
    ("values", 3): (0.070, 0.088),
    ("values", 4): (0.034, 0.041),
    ("values", 8): (0.0023, 0.0024),
    ("relus", 2): (0.365, 0.480),
}


@pytest.mark.parametrize(("method", "bits"), TABLE)
def test_figures(method: str, bits: int) -> None:
    x = torch.randn(200_000)
    for kind, bound in zip(("gelu", "silu"), TABLE[method, bits], strict=True):
        assert relative(x, kind, method, bits) < bound


def uniform(slope: Tensor, bits: int) -> Tensor:
    """The plain quantiser of f' on its known range, end points included."""
    low, high = slope.min(), slope.max()
    step = (high - low) / (2**bits - 1)
    return low + ((slope - low) / step).round() * step


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "hardswish", "sqrt_softplus"])
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("spread", [1.0, 2.0, 3.0])
def test_values_beat_steps_from_three_bits_up(kind: str, bits: int, spread: float) -> None:
    x = torch.randn(50_000) * spread
    assert relative(x, kind, "values", bits) < 0.9 * relative(x, kind, "steps", bits)


@pytest.mark.parametrize("bits", [3, 4])
def test_a_plain_uniform_quantiser_beats_steps_too_near_zero(bits: int) -> None:
    """Its levels include neither 0 nor 1, so ours is always better, and the steps are better for wide inputs."""
    for spread, plain_wins in ((1.0, True), (3.0, False)):
        x = torch.randn(200_000) * spread
        slope = truth(x, "gelu")
        plain = ((uniform(slope, bits) - slope).norm() / slope.norm()).item()
        assert (plain < relative(x, "gelu", "steps", bits)) is plain_wins
        assert relative(x, "gelu", "values", bits) < plain


def test_two_bits_of_relus_are_worse_than_two_bits_of_steps() -> None:
    x = torch.randn(200_000)
    for kind, published in (("gelu", (-0.0492, 3.188)), ("silu", (-0.0405, 6.315))):
        borders, table = PRIMITIVE_STEPS[kind]
        assert abs(table[1] - published[0]) < 1e-3 and abs(borders[2] - published[1]) < 0.02
        assert relative(x, kind, "relus", 2) > 2.4 * relative(x, kind, "steps", 2)
        assert relative(x, kind, "relus", 2) > relative(x, kind, "steps", 1)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "mish", "gelu_clipped"])
def test_saturated_units_are_exact(kind: str, bits: int) -> None:
    x = torch.tensor([-80.0, -30.0, 9.5])
    assert torch.equal(levels(x, kind, "values", bits), torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64))
    if kind != "gelu_clipped":
        assert len(LEVELS[kind][2]) == 4


@pytest.mark.parametrize(("method", "bits"), [("steps", 3), ("values", 3), ("values", 8)])
def test_clipped_gelu_outside_its_bounds(method: str, bits: int) -> None:
    x = torch.tensor([10.5, 50.0])
    assert levels(x, "gelu_clipped", method, bits).abs().max() < 1e-3


def test_unbounded_slopes_are_scaled_per_row() -> None:
    x = torch.randn(6, 40) * torch.tensor([1e-3, 1.0, 50.0, 1e4, 1.0, 0.0])[:, None]
    x[4] = -x[4].abs()
    q, expected = levels(x, "relu_squared", "values", 8), truth(x, "relu_squared")
    assert ((q - expected).norm(dim=1) <= expected.norm(dim=1) / 255).all()
    assert q[4:].eq(0).all()
    assert levels(torch.tensor(2.0), "relu_squared", "values", 8) == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_half_precision_has_the_same_codes(dtype: torch.dtype) -> None:
    x = torch.randn(1001).to(dtype)
    for method, bits in (("steps", 3), ("values", 4)):
        codes, one = fewbit_codes(x, "gelu", (), bits, method)
        assert torch.equal(codes, fewbit_codes(x.double(), "gelu", (), bits, method)[0])
        dx = fewbit_bwd(x, codes, one, "gelu", (), bits, method)
        assert dx.dtype == dtype and dx.shape == x.shape


@pytest.mark.parametrize(
    ("kind", "method", "bits"), [case for case in CASES if case[0] in ("gelu", "relu_squared", "leaky_relu")]
)
def test_bytes(kind: str, method: str, bits: int) -> None:
    x = torch.randn(32, 33, requires_grad=True)
    options = OPTIONS.get(kind, ())
    kept = kept_bytes(lambda: activation_fewbit(x, torch.relu, kind, options, bits=bits, method=method))
    factor = {"relu_squared": 32 * 4, "leaky_relu": 0}.get(kind, 4)
    assert kept == packed_bytes(x.numel(), 1 if kind in EXACT else bits) + factor


def test_working_memory_of_a_relu() -> None:
    """Neither a tensor of ones in the forward nor indices of 8 bytes in the backward."""
    x = torch.randn(64, 1024)
    codes, _ = fewbit_codes(x, "relu", (), 4, "values")
    forward = measure_step(lambda: fewbit_codes(x, "relu", (), 4, "values"), "cpu").peak_bytes
    backward = measure_step(lambda: fewbit_bwd(x, codes, None, "relu", (), 4, "values"), "cpu").peak_bytes
    assert forward < 6 * x.numel() and backward < 10 * x.numel()


@pytest.mark.parametrize("kind", ["relu", "gelu"])
def test_a_scalar(kind: str) -> None:
    x = torch.tensor(0.5, requires_grad=True)
    activation_fewbit(x, torch.relu, kind, bits=8, method="values").backward()
    assert x.grad is not None and x.grad.shape == ()
    assert x.grad.item() == pytest.approx(float(truth(x.detach(), kind)), abs=0.01)


def test_bytes_do_not_depend_on_what_the_next_layer_keeps() -> None:
    """Before a frozen linear layer stock keeps the input of the activation; here nothing but the codes is left."""
    frozen = torch.randn(64, 64)
    trained = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(32, 64)
    stock = kept_bytes(lambda: functional.linear(functional.gelu(functional.linear(x, trained)), frozen))
    ours = kept_bytes(
        lambda: functional.linear(
            activation_fewbit(functional.linear(x, trained), functional.gelu, "gelu", bits=3, method="values"), frozen
        )
    )
    assert stock - ours == x.numel() * 4 - x.numel() * 3 // 8 - 4


MODULES = {name: ACT2FN[name] for name in ACT2FN if name not in ("linear", "prelu", "xielu")}
MODULES |= {type(m).__name__: m for m in (nn.ELU(), nn.SELU(), nn.Softplus(), nn.Softsign(), nn.Hardsigmoid())}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(("variant", "bound"), [("values8", 0.006), ("steps3", 0.2)])
def test_every_pointwise_module_is_patched(name: str, variant: str, bound: float) -> None:
    """These are all modules of ACT2FN, and torch's. The preset "fewbit" is steps3."""
    stock = MODULES[name]
    module = copy.deepcopy(stock)
    site = find_site(module, CompressionConfig(activation_variant=variant))
    assert isinstance(site, Site) and site.settings.keeps == variant
    patch_instance(module, site.mixin, site.settings)
    x = torch.randn(500, requires_grad=True)
    assert torch.equal(module(x), stock(x))
    (ours,), (expected,) = (torch.autograd.grad(function(x).sum(), x) for function in (module, stock))
    assert (ours - expected).norm() < bound * expected.norm()


def test_a_slope_that_the_table_does_not_have_keeps_the_input() -> None:
    for module in (nn.ELU(0.5), nn.Softplus(beta=2)):
        site = find_site(module, CompressionConfig(activation_variant="steps3"))
        assert isinstance(site, Site) and site.settings.keeps == "input" and "table" in site.settings.note
    with pytest.raises(UnknownOptionError, match="constants of 'elu'"):
        activation_fewbit(torch.zeros(3), functional.elu, "elu", (0.5,))


def test_what_there_is_no_table_of_is_named() -> None:
    x = torch.zeros(3)
    for arguments, message in (
        (("gelu", "steps", 5), "number of bits for 'steps' 5; known: 1, 2, 3, 4"),
        (("gelu", "values", 1), "number of bits"),
        (("mish", "relus", 2), "activation for 'relus' 'mish'; known: 'gelu', 'silu'"),
        (("softmax", "steps", 2), "'softmax'"),
        (("gelu", "codes", 2), "few-bit method 'codes'; known: 'steps', 'values', 'relus'"),
    ):
        kind, method, bits = arguments
        with pytest.raises(UnknownOptionError, match=message):
            activation_fewbit(x, torch.relu, kind, bits=bits, method=method)
