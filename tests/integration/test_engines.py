"""The configs of recipes/accelerate on two CPU processes, and transformers' and accelerate's model parallelism.

Each test starts this file once: it trains the stock model and the patched model in the same engine and compares them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "accelerate"
SECONDS = 240
STEPS = 2


@dataclass(frozen=True)
class Engine:
    """One row: a config of the recipes, what is changed in it, and what the model is told.

    Attributes:
        changes: Fields of the yaml. A value that is a dict is merged into the section of that name.
        checkpointing: The model checkpoints its layers, as the recipes do.
    """

    name: str
    recipe: str
    changes: dict[str, Any] = field(default_factory=dict)
    checkpointing: bool = False

    @property
    def type(self) -> str:
        """What accelerate says that it runs: a config that it does not understand becomes plain DDP."""
        kinds = {"ddp": "MULTI_CPU", "fsdp2": "FSDP"}
        return next((kind for start, kind in kinds.items() if self.recipe.startswith(start)), "DEEPSPEED")


ENGINES: tuple[Engine, ...] = (
    Engine("ddp", "ddp.yaml"),
    Engine("ddp in fp32", "ddp.yaml", {"mixed_precision": "no"}),
    Engine("fsdp2", "fsdp2.yaml"),
    Engine("fsdp2 with offloaded parameters", "fsdp2.yaml", {"fsdp_config": {"fsdp_offload_params": True}}),
    Engine("fsdp2 with its own checkpointing", "fsdp2.yaml", {"fsdp_config": {"fsdp_activation_checkpointing": True}}),
    Engine("fsdp2 with the model's checkpointing", "fsdp2.yaml", checkpointing=True),
    Engine("deepspeed zero 2", "deepspeed_zero2.yaml"),
    Engine("deepspeed zero 3", "deepspeed_zero3.yaml"),
    Engine("deepspeed zero 3 with checkpointing", "deepspeed_zero3.yaml", checkpointing=True),
)
BY_ENGINE = {engine.name: engine for engine in ENGINES}
# these are tried wherever the tests run; the others where there is time
QUICK = ("ddp", "fsdp2", "fsdp2 with offloaded parameters", "deepspeed zero 3")

# A family whose gradients are stock's bits in every mode, without the loss head; and one with all that is on by
# default, of which the L2 norm of what training changed may differ by bf16's rounding (2**-8).
BIT_EQUAL, WHOLE = "gpt2-gelu-tanh", "llama"
TOLERANCE = 2**-8


# what the processes run


def _accelerator() -> Any:
    """A new Accelerator on CPUs.

    accelerate counts CPU processes, and shards over them, only if it is told so: its own switch for CPUs turns FSDP and
    DeepSpeed off.
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
    # memory can be pinned for a GPU alone
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(cpu_offload=CPUOffloadPolicy(pin_memory=False)))


def _data(family: Any) -> list[dict[str, Tensor]]:
    """Single samples: the engine's data loader gives each process its own."""
    samples = []
    for seed in range(4):
        batch = family.make_batch("right", seed=seed)
        samples += [{name: x[row] for name, x in batch.items()} for row in range(2)]
    return samples


def _train(accelerator: Any, name: str, patched: bool, checkpointing: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of this process, and what training changed: whole, if not in every process."""
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
    """The size of what stock changed, and our difference from it."""
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


# the tests


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _launched(launcher: list[str], folder: Path, *args: str, deepspeed: bool = False) -> list[dict[str, Any]]:
    """What each process found."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        # accelerate starts no DeepSpeed with it; without a GPU, DeepSpeed takes the CPU by itself
        "ACCELERATE_USE_CPU": str(not deepspeed).lower(),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", *launcher, __file__, "--folder", str(folder), *args]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    errors = [line for line in done.stderr.splitlines() if "rank0" in line or "Error" in line]
    assert done.returncode == 0, "\n".join(errors[-40:])
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(2)]


def _accelerate(folder: Path, recipe: str, changes: dict[str, Any]) -> list[str]:
    """The command that starts two CPU processes with a config of the recipes."""
    yaml = pytest.importorskip("yaml")
    config = yaml.safe_load((RECIPES / recipe).read_text())
    config |= {"use_cpu": config["distributed_type"] != "DEEPSPEED", "num_processes": 2}
    for name, value in changes.items():
        config[name] = {**config.get(name, {}), **value} if isinstance(value, dict) else value
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return [
        "accelerate.commands.launch", "--config_file", str(folder / "config.yaml"),
        "--main_process_port", str(_free_port()),
    ]  # fmt: skip


def _check_engine(engine: Engine, folder: Path) -> None:
    launcher = _accelerate(folder, engine.recipe, engine.changes)
    args = ["--checkpointing"] if engine.checkpointing else []
    results = _launched(launcher, folder, "--what", "engine", *args, deepspeed=engine.type == "DEEPSPEED")
    for rank, found in enumerate(results):
        assert found["processes"] == 2 and found["type"] == engine.type
        for name in (BIT_EQUAL, WHOLE):
            seen = found[name]
            # sharding engines gather the weights in the first process alone
            assert len(seen["losses"]) == STEPS and (rank > 0 or seen["size"] > 0)
            limit = 0.0 if name == BIT_EQUAL else TOLERANCE
            assert seen["error"] <= limit * seen["size"], (name, seen)
            assert seen["losses"] == pytest.approx(seen["stock"], rel=limit, abs=0)


def _needs(engine: Engine) -> None:
    pytest.importorskip("accelerate")
    if "deepspeed" in engine.recipe:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


# two processes take their time to start: one engine a day, all of them with ALL_ENGINES=1
ALL = bool(os.environ.get("ALL_ENGINES"))
DAY = datetime.date.today().toordinal()
every_engine = pytest.mark.skipif(not ALL, reason="ALL_ENGINES=1 runs it")


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_ENGINE if ALL else [QUICK[DAY % len(QUICK)]])
def test_engine(name: str, tmp_path: Path) -> None:
    _needs(BY_ENGINE[name])
    _check_engine(BY_ENGINE[name], tmp_path)


@pytest.mark.slow
@every_engine
def test_tensor_parallel(tmp_path: Path) -> None:
    """`tp_plan="auto"`: weights are DTensors."""
    from tests.families import BY_NAME

    BY_NAME["llama"].build().save_pretrained(tmp_path / "model")
    launcher = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(_free_port())]
    for found in _launched(launcher, tmp_path, "--what", "tensor parallel"):
        assert found["parts"] > 0, "nothing was split"
        assert found["size"] > 0 and found["error"] < 1e-5 * found["size"], found
        assert found["losses"] == pytest.approx(found["stock"], rel=1e-5)


@pytest.mark.slow
@every_engine
def test_context_parallel(tmp_path: Path) -> None:
    """Right, or an error. torch has no ring attention for CPUs: there the patched model raises as stock does."""
    changes = {
        "mixed_precision": "no", "parallelism_config": {
            "parallelism_config_dp_replicate_size": 1, "parallelism_config_dp_shard_size": 1,
            "parallelism_config_tp_size": 1, "parallelism_config_cp_size": 2,
        },
    }  # fmt: skip
    launcher = _accelerate(tmp_path, "fsdp2.yaml", changes)
    for found in _launched(launcher, tmp_path, "--what", "context parallel"):
        if "stock_error" in found:
            assert found["our_error"], "ours goes on where stock raises"
            continue
        assert found["size"] > 0 and found["error"] < 1e-5 * found["size"], found


if __name__ == "__main__":
    main()
