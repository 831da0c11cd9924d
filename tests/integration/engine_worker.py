"""What each process of `test_engines` runs: the stock model and the patched model, trained in the same engine.

It writes the losses and the difference of what training changed to a file for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEPS = 2
# The first family is trained without the loss head: its gradients are bit-equal to stock's in every mode. The second is
# trained with all options that are on by default.
BIT_EQUAL, WHOLE = "gpt2-gelu-tanh", "llama"


def _accelerator() -> Any:
    """A new Accelerator on CPUs.

    accelerate's own option for CPUs switches FSDP and DeepSpeed off. So this function sets the state in which it counts
    CPU processes and shards over them.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    AcceleratorState._reset_state()
    PartialState(cpu=True)
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() != "true":
        return Accelerator()
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() != "true":
        return Accelerator()
    # memory can only be pinned for a GPU
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=CPUOffloadPolicy(pin_memory=False)))


def _data(family: Any) -> list[dict[str, Tensor]]:
    """Single samples, which the engine's data loader divides among the processes."""
    samples = []
    for seed in range(4):
        batch = family.make_batch("right", seed=seed)
        samples += [{name: x[row] for name, x in batch.items()} for row in range(2)]
    return samples


def _train(accelerator: Any, name: str, patched: bool, checkpointing: bool) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of this process, and the changes of whole weights. Some engines gather these in one process only."""
    from hf_actcompress import patch_model
    from tests.families import BODY, BY_NAME

    family = BY_NAME[name]
    model = family.build()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    if checkpointing:
        model.gradient_checkpointing_enable()
    if patched:
        patch_model(model, BODY if name == BIT_EQUAL else "exact")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loader = torch.utils.data.DataLoader(_data(family), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _, batch in zip(range(STEPS), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    after = accelerator.get_state_dict(model)
    changed = {n: after[n].float().cpu() - before[n] for n in before if n in after} if after else {}
    return losses, changed


def _difference(ours: dict[str, Tensor], stock: dict[str, Tensor]) -> dict[str, Any]:
    """The L2 norm of stock's changes, and of our difference from them."""
    assert ours.keys() == stock.keys()
    size = sum(float(x.double().square().sum()) for x in stock.values()) ** 0.5
    error = sum(float((ours[n].double() - x.double()).square().sum()) for n, x in stock.items()) ** 0.5
    return {"size": size, "error": error}


def _run_engine(checkpointing: bool) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in (BIT_EQUAL, WHOLE):
        sides = []
        for patched in (False, True):
            accelerator = _accelerator()
            sides.append(_train(accelerator, name, patched, checkpointing))
            accelerator.free_memory()
        (stock_losses, stock), (losses, ours) = sides
        results[name] = {"losses": losses, "stock": stock_losses, **_difference(ours, stock)}
        results["type"] = accelerator.distributed_type.value
        results["processes"] = accelerator.num_processes
    return results


def _run_tensor_parallel(folder: Path) -> dict[str, Any]:
    """Every process holds a part of each weight; the batch is the same everywhere."""
    import transformers

    from hf_actcompress import patch_model
    from tests.families import BODY, BY_NAME

    torch.distributed.init_process_group("gloo")
    batch = BY_NAME["llama"].make_batch("right")
    sides = []
    for patched in (False, True):
        model = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto").train()
        if patched:
            patch_model(model, BODY)
        loss = model(**batch).loss
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        full = {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).detach() for n, g in grads.items()}
        sides.append((float(loss.detach()), full))
    parts = sum(hasattr(p, "placements") for p in model.parameters())
    (stock_loss, stock), (loss, ours) = sides
    return {"losses": [loss], "stock": [stock_loss], "parts": parts, **_difference(ours, stock)}


def _run_context_parallel() -> dict[str, Any]:
    """Every process holds a part of each sequence. Gradients are summed by FSDP2 over the parts."""
    from hf_actcompress import patch_model
    from tests.families import BODY, BY_NAME

    sides: list[Any] = []
    for patched in (False, True):
        accelerator = _accelerator()
        family = BY_NAME["llama"]
        model = family.build()
        if patched:
            patch_model(model, BODY)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = {**family.make_batch("none")}
        ids = batch["input_ids"][:, :12].contiguous()
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        positions = torch.arange(12)[None].expand_as(ids).contiguous()
        buffers = [ids, labels, positions]
        try:
            with accelerator.maybe_context_parallel(
                buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            ):
                loss = model(input_ids=ids, shift_labels=labels, labels=labels, position_ids=positions).loss
                accelerator.backward(loss)
        except Exception as error:
            sides.append({"error": f"{type(error).__name__}: {str(error)[:300]}"})
            continue
        grads = {n: p.grad.full_tensor().detach() for n, p in model.named_parameters() if p.grad is not None}
        sides.append({"loss": float(loss.detach()), "grads": grads})
    stock, ours = sides
    if "error" in stock or "error" in ours:
        return {"stock_error": stock.get("error"), "our_error": ours.get("error")}
    return {"losses": [ours["loss"]], "stock": [stock["loss"]], **_difference(ours["grads"], stock["grads"])}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("engine", "tensor parallel", "context parallel"))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--checkpointing", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "engine": lambda: _run_engine(args.checkpointing),
        "tensor parallel": lambda: _run_tensor_parallel(args.folder / "model"),
        "context parallel": _run_context_parallel,
    }
    found = run[args.what]()
    (args.folder / f"result{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
