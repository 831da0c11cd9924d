"""The result of `estimate`, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...display.report import Report
from ...display.tables import Table
from ...quick.sizes import readable_size


@dataclass(frozen=True)
class Estimate(Report):
    """Memory of a training, in bytes by part. It prints with rich and serialises.

    Args:
        model: Class of the model.
        device: The device by whose rules bytes are counted.
        batch_size, seq_len: Sequences, and tokens per sequence.
        config: The preset's name or the config; "stock" for the unpatched model.
        engine: "eager" or "compile".
        weights_bytes: Parameters and buffers; shared ones count once.
        gradients_bytes: One gradient per trainable parameter.
        optimizer_bytes: The optimizer's states after its first step.
        kept_bytes: What is alive between forward and backward beyond the three above: kept activations and the loss.
        kept_by_role: `kept_bytes` by role (linear, norm, mlp, attention, loss, checkpoint, ...); the sum is the same.
        kept_per_layer: The part of `kept_bytes` of one layer, on average; 0 for a model of so few layers that all are
            run.
        layers: How many layers the model has.
        step_peak_bytes: The highest allocation during forward and backward above the state before the step, with the
            gradients already allocated.
        optimizer_step_bytes: Temporary tensors of the optimizer's step, which runs after the backward, when activations
            are gone.
        context_bytes: An allowance for what the device takes beside tensors (CUDA context, library workspaces).
        notes: What limits the figures.
        reserved_share, reserved_share_expandable: Bytes that CUDA's caching allocator reserves for each byte of
            tensors, by a replay of some equal steps, without and with `expandable_segments`; None: no replay.
    """

    model: str
    device: str
    batch_size: int
    seq_len: int
    config: str
    engine: str
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    kept_bytes: int
    kept_by_role: dict[str, int]
    kept_per_layer: int
    layers: int
    step_peak_bytes: int
    context_bytes: int
    optimizer_step_bytes: int = 0
    notes: tuple[str, ...] = field(default=())
    reserved_share: float | None = None
    reserved_share_expandable: float | None = None

    @property
    def state_bytes(self) -> int:
        """What is there between the steps: weights, gradients and optimizer states."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def transient_bytes(self) -> int:
        """Bytes of the peak above what is kept: the workspace of the backward of one layer or of the loss."""
        return self.step_peak_bytes - self.kept_bytes

    @property
    def total_peak_bytes(self) -> int:
        """All tensors at the peak of a step: what `torch.cuda.max_memory_allocated` shows."""
        return self.state_bytes + max(self.step_peak_bytes, self.optimizer_step_bytes)

    @property
    def device_bytes(self) -> int:
        """What the card must have: the tensors and the allowance."""
        return self.total_peak_bytes + self.context_bytes

    def reserved_bytes(self, share: float) -> int:
        """What the card must have if the allocator reserves `share` bytes for each byte of tensors."""
        return int(self.total_peak_bytes * share) + self.context_bytes

    def rows(self) -> tuple[tuple[str, int], ...]:
        """The parts of the peak in order, as names and bytes; their sum is `device_bytes`."""
        kept = sorted(self.kept_by_role.items(), key=lambda item: -item[1])
        above = self.optimizer_step_bytes - self.step_peak_bytes
        return (
            ("weights", self.weights_bytes),
            ("gradients", self.gradients_bytes),
            ("optimizer states", self.optimizer_bytes),
            *((f"kept: {role}", size) for role, size in kept),
            ("transient", self.transient_bytes),
            *((("optimizer's step, beyond", above),) if above > 0 else ()),
            *((("device context (allowance)", self.context_bytes),) if self.context_bytes else ()),
        )

    def derived(self) -> dict[str, Any]:
        """The sums, for the JSON form."""
        names = ("state_bytes", "transient_bytes", "total_peak_bytes", "device_bytes")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        compiled = ", compiled" if self.engine == "compile" else ""
        head = (
            f"{self.model}, {self.config}{compiled}, batch {self.batch_size} x {self.seq_len} on {self.device}: "
            f"peak {readable_size(self.device_bytes)}"
        )
        if self.context_bytes:
            head += f" with {readable_size(self.context_bytes)} for the device's context"
        head += f", kept for backward {readable_size(self.kept_bytes)}"
        return "\n".join([head, *self._reserved(), *self.notes])

    def _reserved(self) -> Iterator[str]:
        if self.reserved_share is not None and self.reserved_share_expandable is not None:
            yield (
                f"the allocator reserves {self.reserved_share:.2f} bytes for each byte of tensors, with "
                f"expandable_segments {self.reserved_share_expandable:.2f}, by a replay of equal steps; batches of "
                "different lengths take more"
            )

    def tables(self) -> tuple[Table, ...]:
        """The table of the parts of the peak."""
        parts = [(name, readable_size(size)) for name, size in self.rows()]
        return (
            Table(
                ("part", "bytes"), parts, ("bytes",), "peak of training", ("total", readable_size(self.device_bytes))
            ),
        )
