"""All activations that a transformers config can name, patched and compared with stock."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from hf_actcompress.config import CompressionConfig
from hf_actcompress.models.rules import find_site
from hf_actcompress.models.sites import Declined, Site
from hf_actcompress.modules.base import patch_instance
from hf_actcompress.records import frame
from tests.oracle import assert_equal_bits, assert_within_law, gradients, kept_bytes, nbytes, widened

# keys that are left alone, and why
DECLINED = {"prelu": "parameters of its own"}
UNTOUCHED = {"linear"}
# these run again as a whole (tests/modules/test_recomputed.py)
RUN_AGAIN = {"xielu"}
PATCHED = sorted(set(ACT2FN) - set(DECLINED) - UNTOUCHED - RUN_AGAIN)
OTHERS = {
    "nn.GELU": nn.GELU(),
    "nn.GELU tanh": nn.GELU("tanh"),
    "nn.LeakyReLU": nn.LeakyReLU(0.3),
    "nn.SiLU": nn.SiLU(),
    "nn.ELU": nn.ELU(0.7),
    "nn.SELU": nn.SELU(),
    "nn.Softplus": nn.Softplus(beta=2.0, threshold=5.0),
    "nn.Softsign": nn.Softsign(),
    "nn.Hardsigmoid": nn.Hardsigmoid(),
}


def module_named(name: str) -> nn.Module:
    return copy.deepcopy(OTHERS[name]) if name in OTHERS else ACT2FN[name]


def patched(name: str) -> nn.Module:
    module = module_named(name)
    site = find_site(module, CompressionConfig())
    assert isinstance(site, Site), site
    patch_instance(module, site.mixin, site.settings)
    return module


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Pre-activations like those of a layer: normally distributed, up to about 6 in size, exact in bf16."""
    generator = torch.Generator().manual_seed(0)
    x = 1.5 * torch.randn(64, 50, generator=generator)
    return [x.bfloat16().to(dtype).requires_grad_()]


@pytest.mark.parametrize("name", [*PATCHED, *OTHERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_is_stock_and_gradient_within_law(name, dtype):
    stock = module_named(name)
    ours, theirs = gradients(patched(name), inputs(dtype)), gradients(stock, inputs(dtype))
    assert_equal_bits(ours[:1], theirs[:1])
    truth = gradients(stock, [widened(x) for x in inputs(dtype)])
    assert_within_law(ours, theirs, truth)


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", [*PATCHED, *OTHERS])
def test_keeps_its_input_alone(name):
    """A ReLU keeps its output, as in stock. The next layer may keep the same tensor; here the caller holds it."""
    module, (x,) = patched(name), inputs(torch.float32)

    def run() -> Tensor:
        with frame():
            return module(-x)

    assert kept_bytes(run) == (0 if name == "relu" else nbytes(x))


@pytest.mark.parametrize("name", sorted(set(DECLINED) & set(ACT2FN)))
def test_declined_with_a_reason(name):
    found = find_site(ACT2FN[name], CompressionConfig())
    assert isinstance(found, Declined) and DECLINED[name] in found.reason


def test_identity_is_no_business_of_ours():
    assert all(find_site(ACT2FN[name], CompressionConfig()) is None for name in UNTOUCHED)


@pytest.mark.parametrize("name", [*PATCHED, *OTHERS])
def test_tails(name):
    """Far from zero, f' of the tanh forms is ill-conditioned. An error of half an ulp in tanh grows by the factor x *
    (d inner / dx), which is about 20 at |x| = 5 and at most 40 before tanh saturates in fp32 (|x| about 6).
    """
    x = torch.linspace(-40.03, 40.07, 4000).requires_grad_()
    stock = module_named(name)
    (mine,) = torch.autograd.grad(patched(name)(x).sum(), x)
    (theirs,) = torch.autograd.grad(stock(x).sum(), x)
    wide = x.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(stock(wide).sum(), wide)
    own = (theirs.double() - truth).abs().max().item()
    amplified = 40 * torch.finfo(torch.float32).eps / 2 * max(1.0, truth.abs().max().item())
    assert (mine.double() - truth).abs().max().item() <= max(1.1 * own, amplified)
