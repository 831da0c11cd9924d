"""The configs of recipes/accelerate on two CPU processes, and transformers' and accelerate's model parallelism.

Each test starts `engine_worker` once: it trains the stock model and the patched model in the same engine and compares
them.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.engine_worker import BIT_EQUAL, STEPS, WHOLE

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "accelerate"
WORKER = Path(__file__).with_name("engine_worker.py")
SECONDS = 240


@dataclass(frozen=True)
class Engine:
    """One row: a config of the recipes, the changes in it, and whether the model checkpoints its layers.

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
        """The engine that accelerate must report: it runs plain DDP if it does not understand a config."""
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
# one of these runs each day; all engines run with ALL_CASES=1
QUICK = ("ddp", "fsdp2", "fsdp2 with offloaded parameters", "deepspeed zero 3")

# relative to the L2 norm of the changes by training in the whole model: half of bf16's eps
TOLERANCE = 2**-8


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


def _launched(launcher: list[str], folder: Path, *args: str, deepspeed: bool = False) -> list[dict[str, Any]]:
    """Run the worker in two processes and return the result of each."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
        # if this is true, accelerate does not start DeepSpeed, which uses the CPU anyway if there is no GPU
        "ACCELERATE_USE_CPU": str(not deepspeed).lower(),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", *launcher, str(WORKER), "--folder", str(folder), *args]
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
            # sharding engines gather the weights in the first process only
            assert len(seen["losses"]) == STEPS and (rank > 0 or seen["size"] > 0)
            limit = 0.0 if name == BIT_EQUAL else TOLERANCE
            assert seen["error"] <= limit * seen["size"], (name, seen)
            assert seen["losses"] == pytest.approx(seen["stock"], rel=limit, abs=0)


def _needs(engine: Engine) -> None:
    pytest.importorskip("accelerate")
    if "deepspeed" in engine.recipe:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")


# starting two processes takes long, so one engine runs each day, and all of them with ALL_CASES=1
ALL = bool(os.environ.get("ALL_CASES"))
DAY = datetime.date.today().toordinal()
every_engine = pytest.mark.skipif(not ALL, reason="ALL_CASES=1 runs it")


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
    """The gradients are right, or both models raise: torch has no ring attention for CPUs."""
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
