"""`calibrate`: how much each layer's tensors matter to the gradient, measured once, and the resulting bits."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ...codecs.bit_allocation import Sensitivity, allocate, layer_of
from ...codecs.int_group import BITS
from ...config import PRESETS, CompressionConfig
from ...display.report import Report
from ...display.tables import Table
from ...errors import MeasurementError
from ...models.root import root_module
from ...patching import patch_model, unpatch_model
from ...reporting import patch_report
from ...roles import Role
from ..measurement.allocator import loss_of
from ..measurement.restore import patch_restored, training_forward
from ..measurement.saved_tensors import saved_tensors, storages
from .gradient_error import gradients, relative_error

# The roles whose bits vary. Attention keeps the codec of the base config: below 8 bits the unpacked q and k no longer
# agree with the exact logsumexp.
_VARIED = frozenset({Role.NORM, Role.ACTIVATION, Role.GATED_MLP, Role.LINEAR, Role.DROPOUT})


@dataclass(frozen=True)
class CalibrationRow(Sensitivity):
    """The measurement of one group, and the bits that it gets.

    Args:
        layer: Name of the layer, or of the module itself if it is in no layer.
        field: The field of a CompressionConfig that names the group's codec: "norm", "mlp" or "linear".
        bits: Bits of each element.
    """

    layer: str
    field: str = field(metadata={"formerly": "role"})
    bits: int


@dataclass(frozen=True)
class Calibration(Report):
    """Bits per layer and field of the config. Pass it to `patch_model`; it prints and serialises.

    Args:
        rows: What was measured and decided.
        config: The config that stores each group in its bits.
        average_bits: Mean bits of the codes over all elements of the rows.
        predicted_error: Relative gradient error if the groups' errors are independent, without attention's error.
    """

    rows: tuple[CalibrationRow, ...]
    config: CompressionConfig
    average_bits: float
    predicted_error: float

    def __str__(self) -> str:
        counts = {bits: sum(row.bits == bits for row in self.rows) for bits in BITS}
        groups = ", ".join(f"{count} at {bits} bits" for bits, count in counts.items() if count)
        return f"{len(self.rows)} groups: {groups}; {self.average_bits:.2f} bits on average"

    def tables(self) -> tuple[Table, ...]:
        """A row per group."""
        columns = ("layer", "field", "elements", "error at 4 bits", "bits")
        rows = [(row.layer, row.field, f"{row.elements:,}", f"{row.error:.3%}", str(row.bits)) for row in self.rows]
        return (Table(columns, rows, columns[2:]),)


def calibrate(
    model: nn.Module,
    batch: Mapping[str, Any],
    average_bits: float = 4.0,
    *,
    config: CompressionConfig = PRESETS["adaptive"],
) -> Calibration:
    """Bit widths per layer and field of the config, for this model and batch, measured once.

    For each group (a field in a layer) one forward and backward runs with that group alone in 4 bits; its gradient is
    compared with the exact one. Then each group gets 2, 3, 4 or 8 bits, more where they remove most error. Afterwards
    the model is as it was.

    Args:
        model: Stock or patched, on the device where it trains; gradient checkpointing off.
        batch: Keyword arguments of the forward, with labels; a typical one, it may be smaller than in training.
        average_bits: Mean bits of the codes of norm inputs, MLP pre-activations and stored linear inputs, 2 to 8.
            Scales come on top (0.5 bits per element at 4 and 8 bits, 1 at 2 and 3).
        config: Sets everything else: attention's codec, the variants.

    Returns:
        A Calibration; pass it to `patch_model`.

    Raises:
        MeasurementError: The forward returned no loss, nothing is stored, or gradient checkpointing is on.
        ValueError: `average_bits` outside of 2 .. 8.

    Source:
        GACT (arXiv 2206.11357), which probes during training; `calibrate` probes once, before it.
    """
    allocate((), average_bits)
    inputs = dict(batch)
    with patch_restored(model), training_forward(model):
        elements = _elements(model, inputs, config)
        if not elements:
            raise MeasurementError("calibrate found no norm, MLP or linear tensor that the model stores")
        groups = dict(_sensitivities(model, inputs, elements))
    widths = allocate(list(groups.values()), average_bits)
    measured = zip(groups.items(), widths, strict=True)
    rows = tuple(CalibrationRow(at.elements, at.error, *place, bits) for (place, at), bits in measured)
    overrides = tuple((row.layer, row.field, codec_name(row.bits)) for row in rows)
    total = sum(row.elements for row in rows)
    return Calibration(
        rows=rows,
        config=replace(config, overrides=(*config.overrides, *overrides)),
        average_bits=sum(row.elements * row.bits for row in rows) / total,
        predicted_error=math.sqrt(sum(row.squared_error(row.bits) for row in rows)),
    )


def codec_name(bits: int) -> str:
    """The name of the codec for a width. This codec stores the channels with the largest values separately."""
    return f"int{bits}_outliers"


def _elements(model: nn.Module, inputs: dict[str, Any], config: CompressionConfig) -> dict[tuple[str, str], int]:
    """The number of stored elements by layer and field: twice the bytes by which 8 bits take more than 4 bits."""
    wide, narrow = (_kept(model, inputs, config, codec) for codec in ("int8", "int4"))
    halves = {group: wide[group] - narrow.get(group, 0) for group in wide}
    return {group: 2 * half for group, half in halves.items() if half > 0}


def _kept(
    model: nn.Module, inputs: dict[str, Any], config: CompressionConfig, codec: str
) -> dict[tuple[str, str], int]:
    unpatch_model(model)
    patch_model(model, replace(config, linear=codec, norm=codec, mlp=codec), strict=False)
    fields_of = {row.name: Role(row.role).field for row in patch_report(model).patched if row.role in _VARIED}
    # names as the transformers model itself has them, without a wrapper's prefix: `patch_model` uses these names, also
    # where adapters are added after the calibration
    outer = next((f"{name}." for name, module in model.named_modules() if name and module is root_module(model)), "")
    before = storages(inputs.values())
    found: dict[tuple[str, str], int] = defaultdict(int)
    seen = saved_tensors(model, lambda: model(**inputs), loss_of, before)
    if seen.hidden_from_view:
        raise MeasurementError(
            "calibrate does not see what is kept under gradient checkpointing (or other saved-tensor hooks); turn it "
            "off for the calibration"
        )
    for tensor in seen.tensors:
        if tensor.module in fields_of:
            found[layer_of(tensor.module.removeprefix(outer)), fields_of[tensor.module]] += tensor.nbytes
    return found


def _sensitivities(
    model: nn.Module, inputs: dict[str, Any], elements: dict[tuple[str, str], int]
) -> Iterator[tuple[tuple[str, str], Sensitivity]]:
    unpatch_model(model)
    exact = gradients(model, inputs)
    for (layer, name), count in elements.items():
        unpatch_model(model)
        patch_model(model, CompressionConfig(overrides=((layer, name, codec_name(4)),)), strict=False)
        yield (layer, name), Sensitivity(count, relative_error(gradients(model, inputs), exact))
