"""The programs of the fuzz: orders of forwards and backwards, and the tensors that are compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_actcompress import unpatch_model
from tests.families import Batch, Fp64
from tests.fuzz.between import BETWEEN, Moment
from tests.fuzz.case import Case
from tests.fuzz.hooks import add_hook
from tests.fuzz.models import batch_of, build

# factors for the loss, so that small gradients are not subnormal in fp16; a GradScaler does the same
LOSS_SCALES = {"fp16": 2.0**6, "autocast-fp16": 2.0**10}
AUTOCAST = {"autocast": torch.bfloat16, "autocast-fp16": torch.float16}


@dataclass(frozen=True)
class Seen:
    """One tensor that a program shows. `stage` groups the gradients of one backward.

    Kind "forward" has to equal stock's bit by bit, "gradient" is held to the rules of tests/fuzz/compare.py.
    """

    kind: str
    stage: str
    name: str
    value: Tensor


@dataclass
class Run:
    """One side of a case while its program runs."""

    case: Case
    side: str
    seen: list[Seen] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    output: Any = None
    in_forward: bool = False

    def model(self, index: int = 0, side: str = "") -> Any:
        return build(self.case, side or self.side if self.side != "oracle" else "oracle", index, self._add_hooks)

    def _add_hooks(self, model: Any) -> None:
        if self.case.hook != "none":
            self.handles += add_hook(model, self.case.hook, self.case.place, self.case.at, self._read)

    def _read(self, name: str, value: Tensor) -> None:
        # gradient checkpointing may call a hook again in backward
        if self.in_forward:
            self.show("forward", "hook", f"{name} {len(self.seen)}", value)

    def batch(self, index: int = 0) -> Batch:
        return batch_of(self.case, self.side, index)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The autocast state of the case; fp64 throughout for the oracle."""
        if self.side == "oracle":
            with Fp64():
                yield
            return
        dtype = AUTOCAST.get(self.case.mode)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            yield

    def show(self, kind: str, stage: str, name: str, value: Tensor) -> None:
        self.seen.append(Seen(kind, stage, name, value.detach().clone()))

    def forward(self, model: Any, batch: Batch, stage: str) -> Tensor:
        """One forward; shows the loss, the logits and hidden states. Returns the loss."""
        with self.precision():
            self.in_forward = True
            self.output = output = model(**batch)
            self.in_forward = False
            loss = output.get("loss")
            if loss is None or self.case.labels == "both":
                own = _own_loss(output.logits)
                loss = own if loss is None else loss + own
        self.show("forward", stage, "loss", loss)
        if self.case.program != "threads":
            # what ours draws, such as in a probe, is drawn from generators of its own
            self.show("forward", stage, "generator", torch.get_rng_state())
        if output.get("logits") is not None:
            self.show("forward", stage, "logits", output.logits)
        for index, hidden in enumerate(output.get("hidden_states") or ()):
            self.show("forward", stage, f"hidden {index}", hidden)
        return loss * LOSS_SCALES.get(self.case.mode, 1.0)

    def show_gradients(self, model: Any, stage: str) -> None:
        for name, p in model.named_parameters():
            if p.grad is not None:
                self.show("gradient", stage, name, p.grad)

    def gradients(self, model: Any, batch: Batch, stage: str) -> None:
        """Show the gradients of all parameters and inputs, and take them off."""
        self.show_gradients(model, stage)
        for name, x in _wanted_inputs(batch):
            if x.grad is not None:
                self.show("gradient", stage, f"input {name}", x.grad)
                x.grad = None
        model.zero_grad(set_to_none=True)


def _own_loss(logits: Tensor) -> Tensor:
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype) * 1.7 + 0.3).view(logits.shape)
    return (logits.float() * weights.float()).mean()


def _wanted_inputs(batch: Batch) -> list[tuple[str, Tensor]]:
    return [(name, x) for name, x in batch.items() if isinstance(x, Tensor) and x.requires_grad]


def _step(run: Run) -> None:
    model, batch, row = run.model(), run.batch(), BETWEEN[run.case.between]
    row.before(model)
    moment = Moment(run, model, run.forward(model, batch, "step"), run.output)
    run.output = None
    row.then(moment)
    moment.loss.backward()
    run.gradients(model, batch, "step")


def _accumulate(run: Run) -> None:
    model, batches = run.model(), [run.batch(0), run.batch(1)]
    for index, batch in enumerate(batches):
        (run.forward(model, batch, f"micro-batch {index}") / 2).backward()
    run.gradients(model, batches[0], "accumulated")


def _interleaved(run: Run, second_side: str) -> None:
    models, batches = [run.model(0), run.model(1, second_side)], [run.batch(0), run.batch(1)]
    losses = [run.forward(models[i], batches[i], f"model {i}") for i in (0, 1)]
    for i in (0, 1):
        losses[i].backward()
    for i in (0, 1):
        run.gradients(models[i], batches[i], f"model {i}")


def _two_models(run: Run) -> None:
    _interleaved(run, "")


def _beside_stock(run: Run) -> None:
    _interleaved(run, "stock")


def _two_graphs(run: Run) -> None:
    """Two forwards of one model; the second one's backward comes first."""
    model, batches = run.model(), [run.batch(0), run.batch(1)]
    losses = [run.forward(model, batches[i], f"graph {i}") for i in (0, 1)]
    for i in (1, 0):
        losses[i].backward()
        run.gradients(model, batches[i], f"graph {i}")


def _retain(run: Run) -> None:
    model, batch = run.model(), run.batch()
    loss = run.forward(model, batch, "retained")
    loss.backward(retain_graph=True)
    run.gradients(model, batch, "first backward")
    loss.backward()
    run.gradients(model, batch, "second backward")


def _autocast_backward(run: Run) -> None:
    """Backward runs under bf16 autocast, whatever the forward ran under."""
    model, batch = run.model(), run.batch()
    loss = run.forward(model, batch, "forward")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.side != "oracle"):
        loss.backward()
    run.gradients(model, batch, "backward under autocast")


def _partial(run: Run) -> None:
    """autograd.grad for every third parameter first, then for the inputs and the others."""
    model, batch = run.model(), run.batch()
    wanted = [(name, p) for name, p in model.named_parameters() if p.requires_grad] + _wanted_inputs(batch)
    loss = run.forward(model, batch, "forward")
    first = wanted[run.case.seed % 3 :: 3]
    names = {name for name, _ in first}
    rest = [pair for pair in wanted if pair[0] not in names]
    for stage, pairs, retain in (("some parameters", first, True), ("the others", rest, False)):
        found = torch.autograd.grad(loss, [x for _, x in pairs], retain_graph=retain, allow_unused=True)
        for (name, _), grad in zip(pairs, found, strict=True):
            if grad is not None:
                run.show("gradient", stage, name, grad)


def _eval_between(run: Run) -> None:
    """Two steps with an evaluation between forward and backward. The weights change by the same on each side."""
    model = run.model()
    for step in ("first", "second"):
        batch = run.batch()
        loss = run.forward(model, batch, f"{step} step")
        with torch.no_grad():
            run.forward(model.eval(), batch, f"{step} evaluation")
            run.forward(model.train(), batch, f"{step} forward without a graph")
        loss.backward()
        run.gradients(model, batch, f"{step} step")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.01 * torch.randn(p.shape, generator=generator).to(p.dtype))


def _scaler(run: Run) -> None:
    """Two optimizer steps under a GradScaler. With a large weight the first scale overflows, and steps are skipped."""
    model = run.model()
    start = 2.0**40 if run.case.special == "large-weight" else 2.0**10
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1, enabled=run.side != "oracle")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    for index in range(2):
        batch = run.batch(index)
        scaled = scaler.scale(run.forward(model, batch, f"step {index}") / LOSS_SCALES["autocast-fp16"])
        scaled.backward()
        if run.side != "oracle":
            scaler.unscale_(optimizer)
        run.show_gradients(model, f"unscaled {index}")
        scaler.step(optimizer)
        scaler.update()
        run.show("scale", f"step {index}", "scale", torch.tensor(scaler.get_scale()))
        optimizer.zero_grad()


def _unpatched_backward(run: Run) -> None:
    """The model is unpatched between forward and backward, and takes one more step as stock."""
    model, batch = run.model(), run.batch()
    loss = run.forward(model, batch, "patched forward")
    if run.side == "ours":
        unpatch_model(model)
    loss.backward()
    run.gradients(model, batch, "patched forward")
    run.forward(model, batch, "unpatched step").backward()
    run.gradients(model, batch, "unpatched step")


def _threads(run: Run) -> None:
    """Two models of one class train at once, each in a thread of its own."""
    parts = [Run(run.case, run.side), Run(run.case, run.side)]
    models = [run.model(i) for i in (0, 1)]
    errors: list[BaseException] = []

    def train(i: int) -> None:
        try:
            batch = run.batch(i)
            for step in range(2):
                parts[i].forward(models[i], batch, f"thread {i} step {step}").backward()
                parts[i].gradients(models[i], batch, f"thread {i} step {step}")
        except Exception as error:  # handed to the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=train, args=(i,)) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    run.seen.extend(seen for part in parts for seen in part.seen)


PROGRAMS: dict[str, Callable[[Run], None]] = {
    "step": _step,
    "accumulate": _accumulate,
    "two-models": _two_models,
    "beside-stock": _beside_stock,
    "two-graphs": _two_graphs,
    "retain": _retain,
    "autocast-backward": _autocast_backward,
    "partial": _partial,
    "eval-between": _eval_between,
    "scaler": _scaler,
    "unpatched-backward": _unpatched_backward,
    "threads": _threads,
}


def run_program(case: Case, side: str) -> list[Seen]:
    """Everything that one side of a case shows."""
    run = Run(case, side)
    torch.manual_seed(case.seed + 2)
    PROGRAMS[case.program](run)
    # the hooks of the models are methods of `run`, so that all of it lives until a garbage collection
    run.output = None
    return run.seen
