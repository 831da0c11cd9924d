"""One forward and backward on fake tensors."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ActCompressError, ModelConfigError
from ....garbage import without_collections
from ....private_apis import FakeTensor, FakeTensorMode, run_backward
from ....reference.device_rules import under_rules
from ....roles import Role
from ...measurement.allocator import loss_of
from ...measurement.memory_report import role_of
from ...measurement.saved_tensors import saved_tensors, storages
from ..meta_device import ONE_AT_A_TIME
from .arithmetic import Operations, Work
from .batch import fake_batch
from .compiled import CompiledStep
from .cuda_rules import IN_FP32, CudaRules
from .fake_allocator import FakeAllocator
from .latents import prediction, prediction_loss, tensors_of
from .masks import KnownMasks
from .pictures import takes_pictures, unwrapped
from .positions import check_length
from .ready import Ready, fake_copy, mlps_of, ready
from .setting import Setting
from .sharding import local, resizes_counted, sharded
from .stand_ins import StepRules
from .trl_head import trl_loss
from .workspaces import CPU_WORKSPACES, CUDA_WORKSPACES

# fields of a config that an encoder-decoder's labels need
_FIRST_TOKENS = ("decoder_start_token_id", "pad_token_id")


@dataclass(frozen=True)
class History:
    """The sizes of single storages in one step.

    Args:
        changes, marks, owners, gradients: As in `FakeAllocator`; the marks of the forward come first.
        at_end: How many changes there were when the backward began.
        kept: (role, bytes) of each kept tensor; empty if no roles were asked for.
    """

    changes: Sequence[int]
    marks: Sequence[int]
    at_end: int
    kept: Sequence[tuple[str, int]]
    owners: Sequence[int]
    gradients: Set[int]


@dataclass(frozen=True)
class FakeStep:
    """Bytes of one step.

    Args:
        kept: Bytes alive between forward and backward.
        peak: The most bytes alive at once above weights, gradients and the batch.
        by_role: `kept` by role.
        forward, backward: Bytes alive at each allocation, in order; empty if the step was computed from other steps.
        history: The single sizes behind these sums; None likewise.
    """

    kept: int
    peak: int
    by_role: dict[str, int]
    forward: Sequence[int] = field(default=(), compare=False, repr=False)
    backward: Sequence[int] = field(default=(), compare=False, repr=False)
    history: History | None = field(default=None, compare=False, repr=False)

    @property
    def all_roles(self) -> dict[str, int]:
        """`kept` by role, where "other" is what no module saved: the loss, and copies that are alive and not saved."""
        rest = self.kept - sum(self.by_role.values())
        roles = {**self.by_role, "other": self.by_role.get("other", 0) + rest}
        return {role: size for role, size in roles.items() if size}

    def plus(self, other: FakeStep, times: int) -> FakeStep:
        """The sum of this step and `times` the other."""
        roles = dict.fromkeys([*self.by_role, *other.by_role])
        by_role = {role: self.by_role.get(role, 0) + times * other.by_role.get(role, 0) for role in roles}
        return FakeStep(self.kept + times * other.kept, self.peak + times * other.peak, by_role)

    def divided(self, by: int) -> FakeStep:
        """This step divided by `by`, rounded down."""
        return FakeStep(self.kept // by, self.peak // by, {role: size // by for role, size in self.by_role.items()})


def run_step(model: nn.Module, setting: Setting, *, roles: bool) -> FakeStep:
    """Run forward and backward of a copy of a model on the meta device, counted as on a real device; `roles` says
    whether to attribute kept bytes to roles.
    """
    return run_again(ready(model, setting, roles=roles), setting, roles=roles)


def run_again(copy: Ready, setting: Setting, *, roles: bool) -> FakeStep:
    """Run a step on a copy that exists already; `roles` needs a copy that was made with roles."""
    batch = _batch(copy.model, copy.mode, setting)
    with sharded(copy.model, copy.mode, setting.ranks, setting.autocast):
        return _measure(copy.model, batch, setting, copy.mode, copy.roles if roles else {})


def run_evaluation(model: nn.Module, setting: Setting) -> FakeStep:
    """A forward with labels under ``no_grad``, in evaluation mode, whose outputs are held, as in a Trainer.

    The model is the stock one, whatever `setting.config` is, because a patched one needs less
    (hf_actcompress/ops/README.md). `kept` is the bytes of the outputs.
    """
    mode, fake = fake_copy(model, setting)
    batch = _batch(fake, mode, setting)
    fake.eval()
    with sharded(fake, mode, setting.ranks, setting.autocast):
        allocator = _allocator(fake, batch, setting)
        with _world(setting, mode, allocator), torch.no_grad(), setting.autocast_context(), _failures_named(fake):
            outputs = fake(**batch) if setting.latents is None else prediction(fake, batch)
            kept = allocator.live_bytes
        del outputs
    return FakeStep(kept, allocator.peak_bytes, {}, allocator.timeline)


def run_counted(model: nn.Module, setting: Setting) -> Work:
    """The arithmetic of a forward and backward of the stock model, whatever `setting.config` is."""
    setting = replace(setting, config=None)
    copy = ready(model, setting, roles=False)
    batch = _batch(copy.model, copy.mode, setting)
    allocator, counted = _allocator(copy.model, batch, setting), Operations()
    counted.note(mlps_of(copy, setting))
    with _world(setting, copy.mode, allocator), counted:
        loss = _Eager(copy.model, batch, setting).loss(allocator)
        products, attention = counted.products, counted.attention
        run_backward(loss)
    backward = counted.products + counted.attention - products - attention
    return Work(products, attention, backward, counted.inside)


def _batch(model: nn.Module, mode: FakeTensorMode, setting: Setting) -> dict[str, Any]:
    """A batch of fake tensors."""
    if setting.latents is None:
        check_length(model, max(setting.seq_len, setting.target_len or 0))
    return fake_batch(model, setting, mode)


@contextmanager
def _world(setting: Setting, mode: FakeTensorMode, allocator: FakeAllocator) -> Iterator[None]:
    """The modes that the step runs in. The interpreter's automatic garbage collection is off."""
    with ONE_AT_A_TIME, without_collections(), ExitStack() as stack:
        # from here on only objects of the step are young, so a collection of the young generation finds its cycles
        gc.collect(0)
        if setting.ranks > 1:
            stack.enter_context(resizes_counted(allocator))
        stack.enter_context(under_rules(StepRules(allocator, setting.kernels if setting.cuda else None)))
        stack.enter_context(torch.enable_grad())
        for context in (mode, allocator):
            stack.enter_context(context)
        stack.enter_context(CudaRules(allocator) if setting.cuda else KnownMasks(allocator))
        yield


@contextmanager
def _failures_named(model: nn.Module) -> Iterator[None]:
    """Turn the errors of a model's forward into one that names the model. The cause may be the config, or that pictures
    have no values.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, ActCompressError):
            raise
        name = type(unwrapped(model)).__name__
        if takes_pictures(model):
            raise ModelConfigError(
                f"the forward of {name} reads values of its pictures, which an estimate has not; memory_report(model, "
                f"batch) measures the model on a batch of yours ({_line(error)})"
            ) from error
        said = f"{type(error).__name__}: {_line(error)}{_hint(error, model)}"
        raise ModelConfigError(f"the forward of {name} fails: {said}") from error


def _line(error: Exception) -> str:
    """The first line of an error's message. What torch says below it are the signatures of its functions."""
    return str(error).partition("\n")[0]


def _hint(error: Exception, model: Any) -> str:
    if "NoneType" in str(error) and getattr(unwrapped(model).config, "pad_token_id", 0) is None:
        return " (the config's pad_token_id is null: state the padding token's number there)"
    if not any(name in str(error) for name in _FIRST_TOKENS):
        return ""
    return f" (its decoder's inputs are made of the labels, so the config has to state {' and '.join(_FIRST_TOKENS)})"


def _older_collections() -> int:
    """How many collections of this process may have moved young objects to an older generation."""
    return sum(generation["collections"] for generation in gc.get_stats())


def _allocator(model: nn.Module, batch: dict[str, Any], setting: Setting) -> FakeAllocator:
    rules = (CUDA_WORKSPACES, IN_FP32) if setting.cuda else (CPU_WORKSPACES, {})
    allocator = FakeAllocator(setting.block, *rules, setting.ops)
    given = tensors_of(batch)
    allocator.leave_out(local(chain(model.parameters(), model.buffers(), given)))
    allocator.know(x for x in given if not isinstance(x, FakeTensor))
    return allocator


def _measure(
    model: nn.Module, batch: dict[str, Any], setting: Setting, mode: FakeTensorMode, roles: dict[str, Role]
) -> FakeStep:
    forward = CompiledStep(model, batch, mode, setting) if setting.compiled else _Eager(model, batch, setting)
    allocator = _allocator(model, batch, setting)
    # a count of its own, which nobody reads: it makes tensors faster than the mode does
    with mode, FakeAllocator(results=setting.ops):
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                # an earlier step on this copy may have left one
                p.grad = torch.empty_like(p)
    allocator.add_up(local(p.grad for p in model.parameters() if p.grad is not None))
    with _world(setting, mode, allocator):
        if setting.ranks > 1:
            # FSDP learns in its first step in which order the layers run
            run_backward(forward.loss(allocator))
            allocator.forget()
        collections = _older_collections()
        loss, saved = _with_roles(forward, model, batch, allocator, roles)
        if not loss.requires_grad:
            raise ModelConfigError(
                f"no weight of {type(unwrapped(model)).__name__} that its loss depends on is trained; of a model whose "
                "weights are quantised or frozen train adapters (lora=True, --lora)"
            )
        # if another thread has collected, garbage of this step may have moved to an older generation
        gc.collect(0 if _older_collections() == collections else 2)
        kept, allocations, at_end = allocator.live_bytes, len(allocator.timeline), len(allocator.changes)
        # the tensor's own method would switch off the function mode, and with it the rules of the device
        run_backward(loss)
    by_role: Counter[str] = Counter()
    for role, nbytes in saved:
        by_role[role] += nbytes
    timeline = allocator.timeline
    history = History(allocator.changes, allocator.marks, at_end, saved, allocator.owners, allocator.gradients)
    return FakeStep(kept, allocator.peak_bytes, dict(by_role), timeline[:allocations], timeline[allocations:], history)


def _with_roles(
    step: CompiledStep | _Eager,
    model: nn.Module,
    batch: dict[str, Any],
    allocator: FakeAllocator,
    roles: dict[str, Role],
) -> tuple[Tensor, list[tuple[str, int]]]:
    """The loss, and role and bytes of each kept tensor if `roles` is not empty."""
    if not roles:
        return step.loss(allocator), []
    held: list[Tensor] = []

    def forward() -> Tensor:
        held.append(step.loss(allocator))
        return held[0]

    # these hooks hold what autograd would hold, so the bytes are the same
    seen = saved_tensors(model, forward, loss_of, storages(tensors_of(batch)), allocator.size_of, step.module_of)
    return held[0], [(role_of(tensor, roles, seen.hidden_from_view), tensor.nbytes) for tensor in seen.tensors]


class _Eager:
    def __init__(self, model: nn.Module, batch: dict[str, Any], setting: Setting) -> None:
        self._model, self._batch, self._setting = model, batch, setting

    def loss(self, allocator: FakeAllocator) -> Tensor:
        with self._setting.autocast_context(), _failures_named(self._model):
            if self._setting.trl_head:
                return trl_loss(self._model, self._batch)
            if self._setting.latents is not None:
                return prediction_loss(self._model, self._batch)
            return loss_of(self._model(**self._batch))

    def module_of(self, x: Tensor) -> str | None:
        return None
