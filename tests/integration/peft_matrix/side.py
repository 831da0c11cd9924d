"""One side of a comparison: a model that is built, adapted and trained, and the record of what came out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model
from tests.families import cast_batch

from .method import Context, Method
from .subjects import Subject

STOCK, PATCH_FIRST, ADAPT_FIRST = "stock", "patch, adapt", "adapt, patch"
ORDERS = (PATCH_FIRST, ADAPT_FIRST)
Tensors = dict[str, Tensor]
# The root mean square of a step, and of the noise. PEFT multiplies some factors by hundreds, so a step as large as the
# gradient would change the model far too much.
STEP = 0.02


@dataclass(frozen=True)
class Observation:
    """What one step of a scenario gave: tensors by name, or the error that ended the scenario."""

    label: str
    tensors: Tensors = field(default_factory=dict)
    error: Exception | None = None


@dataclass
class Side:
    """Builds and trains one model, always from the same seeds.

    Attributes:
        order: STOCK, PATCH_FIRST or ADAPT_FIRST.
        folder: For files. Each side has one of its own.
        preset: What `patch_model` is told.
        reference: The weights that stock had before each of its steps. Our side starts each step from them, because
            rounding errors would grow from step to step: PEFT multiplies some factors by hundreds.
        weights: The weights and buffers of this side before each of its steps.
    """

    method: Method
    subject: Subject
    order: str
    folder: Path
    preset: CompressionConfig | str
    dtype: torch.dtype = torch.float32
    reference: tuple[Tensors, ...] = ()
    weights: list[Tensors] = field(default_factory=list)
    trace: list[Observation] = field(default_factory=list)
    model: Any = None
    steps: int = 0
    patched: bool = False
    # the last adapter came after `patch_model`
    late: bool = False
    # no step has been made since the last adapter was put on
    fresh: bool = False

    @property
    def context(self) -> Context:
        self.folder.mkdir(parents=True, exist_ok=True)
        return Context(self.subject, self.folder)

    def base(self) -> Any:
        """A new model without adapters."""
        model = self.subject.family.build(self.dtype)
        self.patched = self.order == PATCH_FIRST
        return patch_model(model, self.preset) if self.patched else model

    def adapt(self, base: Any) -> Any:
        """The model with the method's adapter, under PEFT's default name."""
        torch.manual_seed(1)
        self.fresh = True
        return self.ready(self.method.wrap(base, self.method.config(self.context), self.context))

    def ready(self, model: Any) -> Any:
        """Patch the model if it must be patched after the adapter is added, and switch it to train mode."""
        self.late = self.patched
        if self.order == ADAPT_FIRST and not self.patched:
            patch_model(model, self.preset)
            self.patched = True
        self.model = model.train()
        return self.model

    def note(self, label: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.trace.append(Observation(label, {name: x.detach().clone() for name, x in tensors}))

    def train(self, label: str, *, adapted: bool = True) -> None:
        """Take a step of gradient descent. The weights before it, the loss and all gradients are recorded."""
        self._start(label)
        self.steps += 1
        batch = cast_batch(self.subject.batch(), self.dtype)
        extra = self.method.forward if adapted else {}
        torch.manual_seed(7 + self.steps)
        loss = self.model(**batch, **extra).loss
        loss.backward()
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.note(f"loss of {label}", [("loss", loss)])
        self.note(f"gradients of {label}", grads.items())
        if adapted and self.method.after_backward is not None:
            self.method.after_backward(self.model, self.steps)
        trained = [p for p in self.model.parameters() if p.grad is not None]
        count = sum(p.numel() for p in trained)
        size = sum(float(p.grad.double().square().sum()) for p in trained) ** 0.5
        with torch.no_grad():
            for parameter in trained:
                # a step whose root mean square is STEP over all parameters together
                parameter -= STEP * count**0.5 / max(size, 1e-30) * parameter.grad
        self.model.zero_grad(set_to_none=True)

    def _start(self, label: str) -> None:
        parameters = dict(self.model.named_parameters())
        tensors = {**dict(self.model.named_buffers()), **parameters}
        self.weights.append({name: x.detach().clone() for name, x in tensors.items()})
        if not (self.fresh and self.method.unstable_start):
            self.note(f"weights before {label}", parameters.items())
        self.fresh = False
        # in fp64 buffers are replaced, too, because a method computes some from weights, and stock's were rounded
        replaced = tensors if self.dtype == torch.float64 else parameters
        if self.steps < len(self.reference):
            with torch.no_grad():
                for name, start in self.reference[self.steps].items():
                    if name in replaced:
                        replaced[name].copy_(start)


def disturb(model: nn.Module, seed: int = 2) -> None:
    """Add small noise to trainable weights: if one factor starts at zero, the other factor's gradient is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += STEP * noise.to(parameter.dtype)
