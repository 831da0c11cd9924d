"""The loss head on a GPU: none of its ops makes the host wait for values, in forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.trainer_pt_utils import LabelSmoother

from hf_actcompress import ops
from hf_actcompress.memory.estimation.fake_step.cuda_rules import CudaCalls
from hf_actcompress.reference.device_rules import under_rules
from tests.on_device import OnDevice
from tests.ops.loss_head_problem import problem, wide
from tests.oracle import assert_within_law

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.nonzero_numpy.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
}
ROWS, LENGTH, V = 30, 12, 301


class Waits(TorchDispatchMode):
    """Notes the ops that pass values to the host from tensors in `device`, or from tensors computed from them."""

    def __init__(self, device: list[Any]) -> None:
        super().__init__()
        self.device = {x.untyped_storage()._cdata: x for x in device if isinstance(x, Tensor)}
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        of_device = any(x.untyped_storage()._cdata in self.device for x in given)
        masked = func is aten.index.Tensor and any(x.dtype == torch.bool for x in given[1:])
        if of_device and (func in WAITING or masked):
            self.found.append(str(func))
        result = func(*args, **kwargs)
        if of_device:
            # the tensors are held, so that no later storage gets the address of one of them
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.device.update({x.untyped_storage()._cdata: x for x in made})
        return result


def masked(labels: Tensor) -> Tensor:
    return torch.where(torch.arange(labels.numel(), device=labels.device).view(labels.shape) % 7 == 0, labels, -100)


def several(logits: Any, labels: Tensor) -> Tensor:
    flat = logits.float().view(-1, V)
    first = F.cross_entropy(flat, labels.view(-1), reduction="none").sum()
    return first + F.cross_entropy(flat, labels.view(-1).flip(0)) + ForCausalLMLoss(logits, labels, V)


def smoothed(logits: Any, labels: Tensor) -> Tensor:
    """The Trainer's label smoothing, on logits that have left the model."""
    return LabelSmoother(0.1)({"logits": ops.returned_logits(logits)}, labels, shift_labels=True)


def outside(logits: Any, labels: Tensor, ignored: int = -100) -> Tensor:
    logits = ops.returned_logits(logits)
    return F.cross_entropy(logits[:, :-1].reshape(-1, V), labels[:, 1:].reshape(-1), ignore_index=ignored)


def plainly(logits: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, V), labels.view(-1), label_smoothing=0.1)


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "causal": lambda x, y: ForCausalLMLoss(x, y, V),
    "masked": lambda x, y: ForMaskedLMLoss(x, masked(y), V),
    "nothing counts": lambda x, y: ForCausalLMLoss(x, torch.full_like(y, -100), V),
    "num_items_in_batch": lambda x, y: ForCausalLMLoss(x, y, V, num_items_in_batch=(y >= 0).sum()),
    "shift_labels": lambda x, y: ForCausalLMLoss(x, y, V, shift_labels=masked(y)),
    "label smoothing": plainly,
    "Trainer's label smoothing": smoothed,
    "outside": outside,
    "another ignore_index": lambda x, y: F.cross_entropy(x.view(-1, V), y.clamp(min=0).view(-1), ignore_index=0),
    "outside, another ignore_index": lambda x, y: outside(x, y.clamp(min=0), 0),
    "several": several,
}


@pytest.mark.parametrize(("keep", "targets"), ((True, 1.0), (False, 0.9)), ids=("logits", "no logits, a share"))
@pytest.mark.parametrize("mode", ("fp32", "bf16", "autocast"))
@pytest.mark.parametrize("name", LOSSES)
def test_no_op_hands_values_to_the_host(name: str, mode: str, keep: bool, targets: float) -> None:
    h, weight, bias, labels = problem(n=ROWS * LENGTH, dtype=torch.bfloat16 if mode == "bf16" else torch.float32)
    labels = labels.view(ROWS, LENGTH)

    def loss_of(hidden: Tensor, w: Tensor, b: Tensor, ours: bool) -> Tensor:
        hidden = hidden.view(ROWS, LENGTH, -1)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast" and w.dtype == torch.float32):
            head = partial(ops.deferred_linear, keep_logits=keep, targets=targets) if ours else F.linear
            logits = head(hidden, w, b)
            return LOSSES[name](logits, labels)

    def result(tensors: Any, ours: bool) -> list[Tensor]:
        loss = loss_of(*tensors, ours)
        return [loss.detach(), *torch.autograd.grad(loss, tensors)]

    leaves = [h, weight, bias]
    with under_rules(OnDevice()), Waits([*leaves, labels]) as waits:
        found = result(leaves, True)
    assert waits.found == []
    if name != "nothing counts" and targets == 1:
        # a GPU's autocast casts other tensors of a loss than a CPU's
        with CudaCalls():
            expected = result(leaves, False)
        assert_within_law(found[1:], expected[1:], result(wide(leaves), False)[1:])


def test_on_a_cpu_the_host_looks() -> None:
    """This shows that the test above can fail. On a CPU the head finds rows without a target, and leaves them out."""
    h, weight, bias, labels = problem()
    with Waits([h, weight, bias, labels]) as waits:
        ops.linear_cross_entropy(h, weight, labels, bias)
    assert "aten.nonzero.default" in waits.found


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
def test_torch_sees_no_synchronisation(name: str) -> None:
    h, weight, bias, labels = (x.detach().cuda() for x in problem(n=ROWS * LENGTH, dtype=torch.bfloat16))
    leaves = [x.requires_grad_() for x in (h, weight, bias)]

    def step() -> None:
        for keep in (True, False):
            logits = ops.deferred_linear(h.view(ROWS, LENGTH, -1), weight, bias, keep_logits=keep, targets=0.9)
            torch.autograd.grad(LOSSES[name](logits, labels.view(ROWS, LENGTH)), leaves)

    # the first step compiles and probes kernels, which may wait
    step()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
