"""GACT: bits that follow the measured gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from hf_actcompress import CompressionConfig, fidelity_report, patch_model
from hf_actcompress.codecs import IntGroup
from hf_actcompress.methods.gact.codec import IntMeasured, Width
from hf_actcompress.models.root import root_of
from tests.codecs.helpers import gradient, gradient_error, relative, roundtrip
from tests.families import BY_NAME


def test_the_width_decides() -> None:
    x = torch.randn(64, 512)
    for bits in (2, 3, 4, 8):
        tensors, meta = IntMeasured(width=Width(bits)).pack(x)
        assert sum(t.nbytes for t in tensors) == IntGroup(bits, 256).nbytes(x.shape, x.dtype)
        # 256 normal numbers span 5.6 deviations, and at most 7; stochastic rounding errs by a step over the root of 6
        assert relative(IntMeasured().unpack(tensors, meta) - x, x) < 7 / (2**bits - 1) / 6**0.5
    exact = IntMeasured(width=Width(0))
    assert torch.equal(roundtrip(exact, x), x)
    assert exact.width is not None and exact.width.elements == x.numel()


FAMILY = BY_NAME["llama"]
MEASURED = CompressionConfig(
    linear="int4_measured", norm="int4_measured", mlp="int4_measured", loss_head=False, refresh_bits=1000
)


@pytest.mark.filterwarnings("ignore")
def test_bits_follow_the_gradient() -> None:
    batch = FAMILY.make_batch("none")
    stock = FAMILY.build(torch.float32)
    exact = gradient(stock, batch)
    model = patch_model(copy.deepcopy(stock), MEASURED, seed=0)
    root = root_of(model)
    assert root is not None
    widths = {place: w for place, w in root.generators.learnt.items() if isinstance(w, Width)}
    before = gradient_error(model, batch, exact)
    for _ in range(4):
        gradient(model, batch)
    # the eleventh forward comes after the first measurement
    assert {w.bits for w in widths.values()} != {4}
    elements = sum(w.elements for w in widths.values())
    assert elements and sum(w.bits * w.elements for w in widths.values()) <= 4 * elements
    # from 8.5% to 5.0%
    after = gradient_error(model, batch, exact)
    assert after < 0.8 * before
    # which is what a report says of it
    assert fidelity_report(stock, batch, MEASURED).relative_error == pytest.approx(after, rel=0.25)
    # a copy goes on with what was measured
    root = root_of(copy.deepcopy(model))
    assert root is not None
    assert {p: w.bits for p, w in root.generators.learnt.items()} == {p: w.bits for p, w in widths.items()}


@pytest.mark.filterwarnings("ignore")
def test_the_measurement_leaves_no_trace() -> None:
    """Measuring in the tenth forward changes no loss (with dropout), no gradient and not torch's generator."""
    batch = FAMILY.make_batch("none")
    model = patch_model(FAMILY.build(torch.float32, dropout=0.2), MEASURED, seed=0)
    stock = FAMILY.build(torch.float32, dropout=0.2)
    losses = []
    for one in (stock, model):
        torch.manual_seed(3)
        losses.append([float(one(**batch).loss.detach()) for _ in range(12)])
        losses[-1].append(float(torch.rand(())))
    assert losses[0] == losses[1]
    assert all(p.grad is None for p in model.parameters())
    root = root_of(model)
    assert root is not None and {w.bits for w in root.generators.learnt.values()} != {4}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reentrant", [False, True])
def test_measured_under_checkpointing(reentrant: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Reentrant checkpointing does not support `autograd.grad`: training goes on, and no bits are measured."""
    model, batch = FAMILY.build(torch.float32), FAMILY.make_batch("none")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    patch_model(model, MEASURED)
    for _ in range(11):
        assert gradient(model, batch).isfinite().all()
    root = root_of(model)
    assert root is not None and ({w.bits for w in root.generators.learnt.values()} == {4}) == reentrant
    assert ("reentrant" in caplog.text) == reentrant


@pytest.mark.filterwarnings("ignore")
def test_without_a_loss_bits_stay(caplog: pytest.LogCaptureFixture) -> None:
    batch = {name: x for name, x in FAMILY.make_batch("none").items() if name != "labels"}
    model = patch_model(FAMILY.build(torch.float32), MEASURED)
    for _ in range(10):
        model(**batch)
    root = root_of(model)
    assert root is not None and {w.bits for w in root.generators.learnt.values()} == {4}
    assert "returns no loss" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_learnt_of_an_overflow() -> None:
    batch, model = FAMILY.make_batch("none"), patch_model(FAMILY.build(torch.float32), MEASURED)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.inf)
    for _ in range(10):
        model(**batch)
    root = root_of(model)
    assert root is not None and {w.bits for w in root.generators.learnt.values()} == {4}
