"""The contents of a check-up, and how it is shown: on a console, and as a part of a model card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...display.report import Report
from ...display.tables import Table
from ...quick.sizes import readable_size
from ...versions import version_of

# How many times stock's error a right step may have. On one batch errors vary by chance, and rounding at other places
# makes them a little larger or smaller; what is wrong is off by far more.
OF_STOCK = 2.0


@dataclass(frozen=True)
class StepFigures:
    """What one step needs.

    Args:
        kept_bytes: Kept for backward.
        peak_bytes: The highest point, above weights and gradients.
        seconds: The least time of several steps.
    """

    kept_bytes: int
    peak_bytes: int
    seconds: float


@dataclass(frozen=True)
class CheckUp(Report):
    """One step stock and one patched. It prints, serialises, and writes a part of a model card.

    Args:
        preset: Name of the preset, or "custom".
        exact: Whether it keeps gradients exact up to rounding.
        device: "cpu", or the card's name.
        patched: What was patched, in a few words.
        stock_loss, patched_loss: The loss of the step.
        gradients, equal_gradients: How many parameters get a gradient, and how many of these have stock's bits.
        difference: ``|g - stock| / |stock|`` of all parameters as one vector; None if others get a gradient.
        bound: What rounding explains at most, where there is no error against fp64.
        stock_error, patched_error: ``|g - exact| / |exact|`` against the same step in fp64; None without one.
        figures: Of stock and of the patched model.
        faults: What is wrong; empty if the step is right.
    """

    preset: str
    exact: bool
    device: str
    patched: str
    stock_loss: float
    patched_loss: float
    gradients: int
    equal_gradients: int
    difference: float | None
    bound: float
    stock_error: float | None
    patched_error: float | None
    figures: tuple[StepFigures, StepFigures]
    faults: tuple[str, ...]

    @property
    def right(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """Equal or not, in a few words."""
        if self.faults:
            return f"NOT RIGHT: {'; '.join(self.faults)}"
        if self.equal_gradients == self.gradients:
            return "equal, bit by bit"
        return "equal up to rounding" if self.exact else "lossy, as asked: the loss is equal, gradients are not"

    def derived(self) -> dict[str, Any]:
        """Whether the step is right, and the verdict."""
        return {"right": self.right, "verdict": self.verdict}

    def compared(self) -> str:
        """The gradients beside stock's, in a few words."""
        if self.equal_gradients == self.gradients:
            return f"all {self.gradients} have stock's bits"
        if self.difference is None:
            return "not comparable"
        text = f"{self.equal_gradients} of {self.gradients} have stock's bits"
        if self.stock_error is not None and self.patched_error is not None:
            return f"{text}; error against fp64 {self.patched_error:.1e}, stock's {self.stock_error:.1e}"
        limit = f" (rounding: at most {self.bound:.0e})" if self.exact else ""
        return f"{text}; difference from stock {self.difference:.1e}{limit}"

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.patched}, on {self.device}",
                f"loss: {self.patched_loss:.6g}, stock's {self.stock_loss:.6g}",
                f"gradients: {self.compared()}",
                f"verdict: {self.verdict}",
            ]
        )

    def tables(self) -> tuple[Table, ...]:
        """Kept bytes, peak and time, stock and patched."""
        numbers = ("kept", "peak", "step, ms", "x stock")
        first = self.figures[0].seconds
        rows = [
            (
                name,
                readable_size(side.kept_bytes),
                readable_size(side.peak_bytes),
                f"{1000 * side.seconds:.1f}",
                f"{side.seconds / first:.2f}",
            )
            for name, side in zip(("stock", self.preset), self.figures, strict=True)
        ]
        return (Table(("", *numbers), rows, numbers),)

    def model_card(self, assumptions: str) -> str:
        """A part of a model card, in Markdown.

        Args:
            assumptions: What the figures depend on: batch, dtypes, adapters.
        """
        return "\n".join(
            [
                "### Training memory",
                "",
                f"Fine-tuned with hf_actcompress {version_of('hf-actcompress') or ''}: `{self.patched}`. One step:",
                "",
                self.tables()[0].to_markdown(),
                f"Kept: bytes kept for backward; peak: above weights and gradients. Gradients: {self.compared()}.",
                f"Measured on {self.device} with torch {torch.__version__}, random weights, {assumptions}.",
            ]
        )
