"""calibrate: how it distributes bits, which error it predicts, and that it does not change the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_actcompress import Calibration, CompressionConfig, calibrate, fidelity_report, patch_model, patch_report
from hf_actcompress.codecs.bit_allocation import BITS, Sensitivity, allocate
from hf_actcompress.codecs.table import CODECS
from hf_actcompress.errors import MeasurementError
from hf_actcompress.memory.fidelity.calibration import codec_name, layer_of
from tests.families import BY_NAME

FAMILY = BY_NAME["llama"]
BATCH = FAMILY.make_batch("none")
pytestmark = pytest.mark.filterwarnings("ignore")

groups = st.lists(st.builds(Sensitivity, st.integers(1, 10**6), st.floats(1e-6, 1)), max_size=12)


@given(groups, st.floats(2, 8))
@settings(deadline=None)
def test_the_budget_is_kept_and_used(rows: list[Sensitivity], average: float) -> None:
    widths = allocate(rows, average)
    spent = sum(row.elements * bits for row, bits in zip(rows, widths, strict=True))
    left = average * sum(row.elements for row in rows) - spent
    assert left >= -1e-6 * max(spent, 1)
    # no row could have more bits within the budget
    for row, bits in zip(rows, widths, strict=True):
        wider = [b for b in BITS if b > bits]
        assert not wider or (wider[0] - bits) * row.elements > left - 1e-6 * max(spent, 1)


def test_more_bits_where_the_gradient_depends_on_it() -> None:
    rows = [Sensitivity(1000, 0.5), Sensitivity(1000, 0.01)]
    assert allocate(rows, 5) == [8, 2]
    # with equal errors the smaller row gets more bits, because they cost fewer bytes there
    rows = [Sensitivity(10_000, 0.1), Sensitivity(1000, 0.1)]
    assert allocate(rows, 2.6) == [2, 8]
    rows = [Sensitivity(1000, 0.1), Sensitivity(1000, 0.1)]
    assert allocate(rows, 3) == [3, 3]


@pytest.mark.parametrize("average", [1.9, 8.1, float("nan")])
def test_an_average_out_of_range_is_named(average: float) -> None:
    with pytest.raises(ValueError, match="average_bits"):
        calibrate(FAMILY.build(torch.float32), BATCH, average)


def test_every_width_has_its_codec() -> None:
    assert all(codec_name(bits) in CODECS for bits in BITS)


@pytest.mark.parametrize(
    ("module", "layer"),
    [("model.layers.3.mlp.act_fn", "model.layers.3"), ("transformer.h.11", "transformer.h.11"), ("norm", "norm"),
     ("encoder.block.0.layer.1.DenseReluDense", "encoder.block.0"), ("conv2.norm", "conv2.norm")],
)  # fmt: skip
def test_layer_of_a_module(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_calibrate_end_to_end() -> None:
    model = patch_model(FAMILY.build(torch.float32))
    before = [type(module) for module in model.modules()]
    state = torch.get_rng_state()
    found = calibrate(model, BATCH, 5)
    assert [type(module) for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert found.average_bits <= 5
    assert {row.field for row in found.rows} == {"norm", "mlp"} and all(row.error > 0 for row in found.rows)
    tokens, width = BATCH["input_ids"].numel(), model.config.intermediate_size
    # a gated MLP keeps gate and up
    assert all(row.elements == 2 * tokens * width for row in found.rows if row.field == "mlp")
    assert Calibration.from_json(found.to_json()) == found
    assert Calibration.from_json(found.to_json().replace('"field"', '"role"')) == found, "a file of before"
    patch_model(model, found)
    codecs = {row.name: row.codec for row in patch_report(model).rows if row.role == "gated_mlp"}
    assert codecs == {f"{row.layer}.mlp": codec_name(row.bits) for row in found.rows if row.field == "mlp"}


def test_the_predicted_error_is_the_measured_one() -> None:
    """The prediction adds up the squared errors of the groups. Attention is exact here, as no group contains it."""
    model = FAMILY.build(torch.float32)
    found = calibrate(model, BATCH, 4, config=CompressionConfig())
    measured = fidelity_report(model, BATCH, found, seeds=1).relative_error
    assert found.predicted_error == pytest.approx(measured, rel=0.35)


def test_under_checkpointing_it_says_that_it_sees_nothing() -> None:
    model = FAMILY.build(torch.float32)
    model.gradient_checkpointing_enable()
    with pytest.raises(MeasurementError, match="checkpointing"):
        calibrate(model, BATCH)


def test_the_names_are_those_of_the_model_inside_its_wrapper() -> None:
    """The names have no prefix of PEFT, so that a calibration also fits a model whose adapters are added later."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(FAMILY.build(torch.float32), LoraConfig(r=4, target_modules="all-linear"))
    found = calibrate(model, BATCH, 5)
    assert {row.layer for row in found.rows} <= {"model.layers.0", "model.layers.1", "model.norm"}
    patch_model(model, found)
    rows = [row for row in patch_report(model).rows if row.role == "gated_mlp"]
    bits = {row.layer: row.bits for row in found.rows if row.field == "mlp"}
    assert rows and all(row.codec == codec_name(bits[row.name[len("base_model.model.") :][:14]]) for row in rows)
