"""Every preset on three models: bytes kept, gradient error, step time, and where a training of 300 steps ends.

    python recipes/evaluate_presets.py                        # all of it: three hours on one core
    python recipes/evaluate_presets.py --jobs llama --presets exact int8 --seeds 1 --steps 50

The models are a pretrained MiniLM (classification) and a GPT-2- and a Llama-like one trained here first (language
modelling). Kept bytes are those of the layers in bf16. Gradient errors are in fp32 with dropout off, and also in units
of the error that bf16 autocast makes on the same batch. Step times are the least process times of interleaved steps.

Losses are held-out ones at the end of a training in which a bad gradient shows: MiniLM is fine-tuned, the language
models learn from random weights at six times the rate of a fine-tune. Fine-tuned at a low rate they end within a
thousandth of stock under most presets. Each sequence comes three times (`--passes`), because WTA-CRS samples by what it
saw when the same sequence came last. Each seed is one order of the batches (and one dropout), the same for stock and
preset: the mean of the paired differences has a 95% confidence interval (Student's t), and a preset is "worse" or
"better" where that excludes zero. Of twenty presets that are as good as stock, one is told apart by chance. Lossless
presets train with the first seed alone. Writes evaluation-JOB.json as it goes, and goes on from there (jobs may run
side by side); then evaluation.md and .png of all.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from common.data import shuffled_order
from common.evaluation_report import write_reports
from common.jobs import JOBS, Job, fit, held_out_loss, make_job
from common.models import without_dropout
from tqdm.auto import tqdm

from hf_actcompress import PRESETS, CompressionConfig, calibrate, fidelity_report, memory_report, patch_model

LEARNING_RATE = 3e-3  # from random weights
CALIBRATED = "calibrated"  # calibrate(model, batch, average_bits=4) on the job's own first batch
ROWS = ("stock", *PRESETS, CALIBRATED)


def config_of(row: str, job: Job) -> CompressionConfig | str:
    """The preset, or the calibration of the job's model."""
    if row != CALIBRATED:
        return row
    return calibrate(without_dropout(copy.deepcopy(job.model)), next(job.batches(0, 1)), average_bits=4).config


def kept_h(model: Any, batch: dict[str, torch.Tensor], config: CompressionConfig | str, stock: bool) -> float:
    """Bytes per token and layer divided by the hidden size, for the model in bf16."""
    report = memory_report(model, batch, config)
    kept = report.layer_stock_bytes if stock else report.layer_patched_bytes
    return kept / (report.layer_tokens * report.hidden_size)


def step_ratio(job: Job, config: CompressionConfig | str, rounds: int) -> float:
    """Least process time of a forward and backward divided by stock's; the two alternate."""
    batch = next(job.batches(0, 1))
    stock, ours = copy.deepcopy(job.model).train(), patch_model(copy.deepcopy(job.model).train(), config)
    times: dict[int, list[float]] = {id(stock): [], id(ours): []}
    for _ in range(rounds + 2):  # two to warm up
        for model in (stock, ours):
            began = time.process_time()
            model(**batch).loss.backward()
            times[id(model)].append(time.process_time() - began)
    return min(times[id(ours)][2:]) / min(times[id(stock)][2:])


def gradient(model: Any, batch: dict[str, torch.Tensor], bf16: bool) -> torch.Tensor:
    """The gradient of all parameters as one vector; with `bf16` under autocast."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(**batch).loss
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def bf16_error(job: Job) -> float:
    """What training in bf16 does to the gradient of the batch on which the presets' errors are measured."""
    model, batch = without_dropout(copy.deepcopy(job.model)).train(), next(job.batches(0, 1))
    exact = gradient(model, batch, bf16=False)
    return float((gradient(model, batch, bf16=True) - exact).norm() / exact.norm())


def final_loss(job: Job, config: CompressionConfig | str | None, seed: int, args: argparse.Namespace) -> float:
    """Held-out loss after training a copy of the job's model (its untrained form if it has one); None is stock."""
    run = copy.copy(job)
    trained_on = shuffled_order(len(job.train), 0, args.steps * job.batch_size // args.passes)
    run.train = [job.train[i] for i in trained_on]
    run.model = copy.deepcopy(job.untrained or job.model)
    run.lr = LEARNING_RATE if job.untrained else job.lr
    if config is not None:
        patch_model(run.model, config, seed=seed)
    fit(run, seed, args.steps)
    return held_out_loss(run)


def measure(job: Job, row: str, args: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    config = config_of(row, job) if row != "stock" else "exact"
    steady, batch = without_dropout(copy.deepcopy(job.model)).train(), next(job.batches(0, 1))
    result: dict[str, Any] = {
        "kept_h": kept_h(copy.deepcopy(steady).bfloat16(), batch, config, stock=row == "stock"),
        "gradient_error": 0.0,
        "cosine": 1.0,
        "step_ratio": 1.0,
    }
    if row != "stock":
        report = fidelity_report(steady, batch, config, seeds=2)
        result |= {"gradient_error": report.relative_error, "cosine": report.cosine}
        result["step_ratio"] = step_ratio(job, config, args.rounds)
    trained = config if row != "stock" else None
    seeds = 1 if row != "stock" and (PRESETS[config] if isinstance(config, str) else config).lossless else args.seeds
    result["losses"] = [final_loss(job, trained, seed, args) for seed in range(seeds)]
    return result


def load_results(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run with the same settings."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        if found["settings"] == settings and found["versions"] == versions:
            return found
    return {"command": "", "settings": settings, "versions": versions, "rows": {}}


def run_job(name: str, args: argparse.Namespace) -> None:
    """Measure the missing rows of one job."""
    path = args.output_dir / f"evaluation-{name}.json"
    start = "pretrained" if name == "minilm" else "random weights"
    chosen = {option: getattr(args, option) for option in ("seeds", "steps", "passes", "rounds")}
    results = load_results(path, {"start": start, **chosen})
    results["command"] = args.command
    missing = [row for row in ("stock", *args.presets) if row not in results["rows"]]
    if not missing and "bf16_error" in results:
        return
    job = make_job(name, args.steps)
    results["bf16_error"] = bf16_error(job)
    path.write_text(json.dumps(results, indent=2) + "\n")
    for row in tqdm(missing, desc=name):
        measured = results["rows"] | {row: measure(job, row, args)}
        results["rows"] = {name: measured[name] for name in ROWS if name in measured}
        path.write_text(json.dumps(results, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--presets", nargs="+", choices=ROWS[1:], default=list(ROWS[1:]))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="of each training, and of the one before it")
    parser.add_argument("--passes", type=int, default=3, help="over the sequences of a training")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each model")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/evaluate_presets"))
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    args.command = f"python recipes/evaluate_presets.py {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    for name in args.jobs:
        run_job(name, args)
    write_reports(args.output_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
