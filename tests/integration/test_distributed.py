"""Two processes over gloo: DDP and FSDP2 with a patched model, and every preset under DDP.

Gradients are compared with those of the stock model in the same wrapper, and with those of one process in fp64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_actcompress import PRESETS, patch_model
from hf_actcompress.ops import DeferredLogits
from tests.families import BODY, BY_NAME, Family, Gradients, differing, oracle_step, relative_error
from tests.layers.plans import assert_compiled, calls
from tests.oracle import EXACT

RANKS = 2


@dataclass(frozen=True)
class Case:
    """One row.

    FSDP frees the parameters of a unit that is not in use, and a record may need them in the backward of another unit:
    BERT's layer i ends with a norm whose output layer i + 1 rebuilds, and the final norm's output is rebuilt by a head
    that may be a unit of its own.
    """

    family: str
    wrapper: str
    head: str = ""
    mixed: bool = False
    checkpointing: bool = False
    # the inputs of checkpointed layers go through a lossless codec
    packed: bool = False
    compiled: bool = False
    # the layers' plans are compiled
    compiled_plans: bool = False
    whole: bool = False
    bit_equal: bool = True


CASES = (
    Case("bert", "ddp"),
    Case("gpt2-gelu-tanh", "ddp"),
    Case("llama", "ddp", bit_equal=False),
    Case("bert", "ddp", whole=True, bit_equal=False),
    Case("bert", "fsdp"),
    Case("bert", "fsdp", mixed=True),
    Case("bert", "fsdp", checkpointing=True),
    Case("bert", "fsdp", checkpointing=True, packed=True),
    Case("bert", "fsdp", whole=True, bit_equal=False),
    Case("gpt2-gelu-tanh", "fsdp"),
    Case("llama", "fsdp", bit_equal=False),
    Case("llama", "fsdp", mixed=True),
    Case("llama", "fsdp", mixed=True, head="norm and head"),
    Case("llama", "fsdp", mixed=True, head="each"),
    Case("llama", "fsdp", mixed=True, checkpointing=True),
    Case("llama", "fsdp", mixed=True, checkpointing=True, packed=True),
    Case("llama", "fsdp", head="each", whole=True, bit_equal=False),
    Case("llama", "fsdp", head="as Accelerate", whole=True, bit_equal=False),
    Case("llama", "fsdp", mixed=True, head="as Accelerate", whole=True, bit_equal=False),
    Case("llama", "fsdp", mixed=True, compiled=True, bit_equal=False),
    Case("bert", "ddp", compiled_plans=True, bit_equal=False),
    Case("llama", "fsdp", mixed=True, checkpointing=True, compiled_plans=True, bit_equal=False),
)


def _wrap(model: Any, case: Case) -> Any:
    if case.wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=case.family == "bert")
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (RANKS,))}
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in next(m for m in model.modules() if isinstance(m, nn.ModuleList)):
        if case.compiled:
            layer.compile(backend="hf_actcompress")
        fully_shard(layer, **options)
    if case.head == "as Accelerate":
        # its weights stay whole from forward to backward, so that the loss can read them behind the head's own call
        fully_shard([model.model.norm, model.lm_head], **options, reshard_after_forward=False)
    if case.head == "norm and head":
        fully_shard([model.model.norm, model.lm_head], **options)
    if case.head == "each":
        fully_shard(model.model.norm, **options)
        fully_shard(model.lm_head, **options)
    return fully_shard(model, **options)


def _gradients(model: Any, family: Family, rank: int) -> Gradients:
    """The mean of two steps' gradients, whole on every rank, under the names of the model without its wrapper."""
    torch.manual_seed(rank)
    for _ in range(2):
        model(**family.make_batch("right", seed=rank)).loss.backward()
    named = {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).detach().clone() / 2 for n, g in named.items()}


def _run_case(case: Case, rank: int) -> None:
    family = BY_NAME[case.family]
    # dropout is off: the oracle has no masks
    config = replace(
        PRESETS["exact"] if case.whole else BODY,
        checkpoint_input="offload" if case.packed else "identity",
        compile=case.compiled_plans,
    )
    models = [family.build(), patch_model(family.build(), config)]
    for model in models:
        if case.checkpointing:
            model.gradient_checkpointing_enable()
    stock, ours = (_gradients(_wrap(model, case), family, rank) for model in models)
    if case.head == "as Accelerate":
        assert isinstance(models[1](**family.make_batch()).logits, DeferredLogits)
    # layers run by plans, although FSDP2 uses other dtypes than the model had when it was patched
    assert case.compiled or all(calls(models[1]))
    if case.compiled_plans:
        assert_compiled(models[1])
    assert stock.keys() == ours.keys()
    if case.bit_equal:
        assert not differing(ours, stock)
    parts = [oracle_step(family.build(), family.make_batch("right", seed)) for seed in range(RANKS)]
    oracle = {name: sum(part[name] for part in parts) / RANKS for name in parts[0]}
    assert oracle.keys() <= ours.keys()
    own = relative_error(stock, oracle)
    # bf16 gradients have about three digits; an error in averaging the two ranks would be much larger
    assert own < (0.03 if case.mixed else 1e-5)
    assert relative_error(ours, oracle) <= EXACT * own


# presets that draw random numbers, which differ between processes
STOCHASTIC = ("actnn", "mesa", "gact", "sampled", "wtacrs")


def _run_preset(preset: str, rank: int) -> None:
    """Both processes have the same batch. Gradients differ only if the preset draws numbers, and DDP takes the mean."""
    family = BY_NAME["bert" if preset in ("tempo", "inverted", "fewbit", "forward_ad") else "llama"]
    batch = family.make_batch("right")

    def gradients(model: Any) -> Gradients:
        # no seed is set here: patch_model has given each process random numbers of its own
        model(**batch).loss.backward()
        return {n.removeprefix("module."): p.grad for n, p in model.named_parameters() if p.grad is not None}

    own = gradients(patch_model(family.build(), preset))
    everyones: list[Any] = [None] * RANKS
    dist.all_gather_object(everyones, own)
    assert bool(differing(*everyones)) == (preset in STOCHASTIC)
    wrapped = nn.parallel.DistributedDataParallel(patch_model(family.build(), preset), find_unused_parameters=True)
    synced = gradients(wrapped)
    # halving is exact in binary, so it may come before or after the sum
    assert not differing(synced, {n: (everyones[0][n] + everyones[1][n]) / 2 for n in own})


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    failures = []
    checks: list[tuple[Any, Callable[[Any, int], None]]] = [(case, _run_case) for case in CASES]
    checks += [(preset, _run_preset) for preset in PRESETS]
    for what, check in checks:
        try:
            check(what, rank)
        except AssertionError as error:  # both ranks fail alike, so the next case can still be run
            failures.append(f"{what}: {error}")
    dist.destroy_process_group()
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """All cases run in one pair of processes, because starting processes takes longer than running the cases."""
    mp.spawn(_worker, (str(tmp_path),), nprocs=RANKS)
