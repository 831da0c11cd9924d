"""Let memory run out at the n-th op of a training step, and check that the patched model still works afterwards.

`python -m tests.fuzz.out_of_memory` tries every n of every subject.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import CompressionConfig, patch_model, unpatch_model
from hf_actcompress.records import live_entries
from tests.families import BODY, BY_NAME, Batch, Family, differing, step
from tests.fuzz.check import prepare
from tests.fuzz.soak import live_tensors
from tests.patching_checks import is_patched, types_of


class OutOfMemoryAt(TorchDispatchMode):
    """Raises torch.OutOfMemoryError in place of the n-th op, counted from 0; `ops` counts all that were called."""

    def __init__(self, n: int | None = None) -> None:
        super().__init__()
        self.n, self.ops = n, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        if self.n is not None and self.ops == self.n + 1:
            raise torch.OutOfMemoryError(f"injected at op {self.n}: {func}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Subject:
    """What is trained. The model is in bf16, because its family's gradients are bit-equal to stock's there."""

    name: str
    family: str
    config: CompressionConfig
    checkpointing: bool = False
    lora: bool = False
    padding: str = "right"


SUBJECTS = (
    Subject("bert", "bert", BODY),
    Subject("llama with its loss head", "llama", CompressionConfig()),
    Subject("bert without padding", "bert", CompressionConfig(drop_padding=True, loss_head=False)),
    Subject("llama with LoRA, checkpointed", "llama", BODY, checkpointing=True, lora=True),
    Subject(
        "gpt2, a compressed checkpoint input",
        "gpt2-gelu-tanh",
        CompressionConfig(checkpoint_input="offload", loss_head=False),
        checkpointing=True,
    ),
)


@dataclass
class Pair:
    """A patched model, the same model as stock, and two batches."""

    subject: Subject
    ours: Any
    stock: Any
    batch: Batch
    other: Batch

    @property
    def family(self) -> Family:
        return BY_NAME[self.subject.family]


def make_pair(subject: Subject) -> Pair:
    """Both models after a step on each batch, so that objects that are made only once exist already."""
    family = BY_NAME[subject.family]
    stock, ours = _model(subject), _model(subject)
    patch_model(ours, subject.config)
    batches = family.make_batch(subject.padding, 0), family.make_batch("none", 1)
    for model in (stock, ours):
        for batch in batches:
            step(model, batch)
    return Pair(subject, ours, stock, *batches)


def _model(subject: Subject) -> Any:
    model = BY_NAME[subject.family].build(torch.bfloat16, dropout=0.1)
    if subject.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    if subject.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if subject.lora:
            model.enable_input_require_grads()
    return model


def count_ops(pair: Pair) -> int:
    """Ops of one step of the patched model."""
    with OutOfMemoryAt() as counter:
        step(pair.ours, pair.batch)
    return counter.ops


def hooks_of(model: nn.Module) -> int:
    """Hooks on modules, parameters excluded."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, name)) for module in model.modules() for name in names)


def try_at(pair: Pair, n: int) -> list[str]:
    """Let memory run out at op n of a step. Returns messages about what is wrong afterwards."""
    ours = pair.ours
    hooks, tensors = hooks_of(ours), _tensor_count()
    message = _run_out(ours, pair.batch, n)
    found = [] if message else [f"op {n}: nothing was raised"]
    ours.zero_grad(set_to_none=True)
    if live_entries():
        found.append(f"{live_entries()} registry entries")
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        found.append("saved-tensor hooks are still on")
    if hooks_of(ours) != hooks:
        found.append(f"{hooks_of(ours) - hooks} module hooks more")
    # the batch without padding comes first: its result would be wrong if the mask of the failed step were still used
    for name, batch in (("another", pair.other), ("the same", pair.batch)):
        found += _compare_step(pair, batch, f"the next step on {name} batch")
    # after a failed backward, torch's engine keeps its queue until the next backward, in stock too
    if _tensor_count() > tensors:
        found.append(f"{_tensor_count() - tensors} tensors more are alive two steps later")
    return [f"{message or n}: {line}" for line in found]


def _run_out(model: Any, batch: Batch, n: int) -> str:
    try:
        with OutOfMemoryAt(n):
            step(model, batch)
    except torch.OutOfMemoryError as error:
        return str(error)
    return ""


def retry_at(pair: Pair, n: int) -> list[str]:
    """Let memory run out at op n of a backward whose graph is kept, and run that backward again."""
    torch.manual_seed(7)
    loss = pair.ours(**pair.batch).loss
    try:
        with OutOfMemoryAt(n):
            loss.backward(retain_graph=True)
        # the backward has fewer ops than the step
        pair.ours.zero_grad(set_to_none=True)
        return []
    except torch.OutOfMemoryError as error:
        message = str(error)
    pair.ours.zero_grad(set_to_none=True)
    loss.backward()
    grads = _taken(pair.ours)
    _, expected = step(pair.stock, pair.batch)
    wrong = differing(grads, expected)
    return [f"{message}: the second backward of the same graph differs in {wrong[:3]}"] if wrong else []


def _taken(model: Any) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def _tensor_count() -> int:
    gc.collect()
    return len(live_tensors())


def _compare_step(pair: Pair, batch: Batch, what: str) -> list[str]:
    loss, grads = step(pair.ours, batch)
    expected_loss, expected = step(pair.stock, batch)
    if not torch.equal(loss, expected_loss):
        return [f"{what}: loss {loss}, stock {expected_loss}"]
    wrong = differing(grads, expected)
    return [f"{what}: gradients of {wrong[:3]} differ"] if wrong else []


def unpatches(pair: Pair) -> list[str]:
    """Whether the model that ran out of memory goes back to stock."""
    unpatch_model(pair.ours)
    found = (
        [] if not is_patched(pair.ours) and types_of(pair.ours) == types_of(pair.stock) else ["not all is unpatched"]
    )
    return found + _compare_step(pair, pair.batch, "unpatched")


def try_all(subject: Subject, every: int = 1, first: int = 0) -> tuple[int, list[str]]:
    """Try every `every`-th op, from op `first` on. Returns how many were tried, and messages about what was wrong."""
    pair = make_pair(subject)
    chosen = range(first % every, count_ops(pair), every)
    found = [line for n in chosen for line in try_at(pair, n)]
    if not subject.checkpointing:
        # torch does not recompute a checkpointed region a second time after a failure, in stock too
        found += [line for n in chosen for line in retry_at(pair, n)]
    return len(chosen), found + unpatches(pair)


def main() -> int:
    """Try the ops of every subject. Returns the exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.out_of_memory", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="try every so many-th op")
    arguments = parser.parse_args()
    prepare()
    wrong = 0
    for subject in SUBJECTS:
        tried, found = try_all(subject, arguments.every)
        wrong += len(found)
        print(f"{subject.name}: {tried} ops tried, {len(found)} wrong", flush=True)
        for line in found[:10]:
            print(f"  {line}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
