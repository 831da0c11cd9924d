"""Every preset on three models: bytes kept, gradient error, step time, and where a training of 300 steps ends.

    python recipes/evaluate_presets.py                        # all of it: three hours on one core
    python recipes/evaluate_presets.py --jobs llama --presets exact int8 --seeds 1 --steps 50
    python recipes/evaluate_presets.py --renew errors times   # again; the trainings of an earlier run stay

The models are a pretrained MiniLM (classification) and a GPT-2- and a Llama-like one trained here first (language
modelling). Kept bytes are those of the layers in bf16. Gradient errors are those of all parameters as one vector, in
fp32 with dropout off, on `--batches` batches; and in units of the errors that bf16 autocast and weights in bf16 make on
the same batches. Step times are the least process times of interleaved steps.

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
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from common.bf16 import bf16_errors
from common.data import shuffled_order
from common.evaluation_report import write_reports
from common.jobs import JOBS, Job, fit, held_out_loss, make_job
from common.models import without_dropout
from common.options import positive
from tqdm.auto import tqdm

from hf_actcompress import PRESETS, CompressionConfig, calibrate, fidelity_report, memory_report, patch_model

LEARNING_RATE = 3e-3  # from random weights
CALIBRATED = "calibrated"  # calibrate(model, batch, average_bits=4) on the job's own first batch
ROWS = ("stock", *PRESETS, CALIBRATED)
PARTS = ("bytes", "errors", "times", "losses")  # of a row


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


def gradient_errors(job: Job, config: CompressionConfig | str | None, batches: int) -> dict[str, Any]:
    """The gradient error on each of some batches, and its median; the cosine's median."""
    if config is None:
        return {"gradient_errors": [0.0] * batches, "gradient_error": 0.0, "cosine": 1.0}
    model = without_dropout(copy.deepcopy(job.model)).train()
    reports = [fidelity_report(model, batch, config, seeds=2) for batch in job.batches(0, batches)]
    errors = [report.relative_error for report in reports]
    cosine = statistics.median(report.cosine for report in reports)
    return {"gradient_errors": errors, "gradient_error": statistics.median(errors), "cosine": cosine}


def final_loss(job: Job, config: CompressionConfig | str | None, seed: int, args: argparse.Namespace) -> float:
    """Held-out loss after training a copy of the job's model (its untrained form if it has one); None is stock."""
    run = copy.copy(job)
    trained_on = shuffled_order(len(job.train), 0, max(1, args.steps * job.batch_size // args.passes))
    run.train = [job.train[i] for i in trained_on]
    run.model = copy.deepcopy(job.untrained or job.model)
    run.lr = LEARNING_RATE if job.untrained else job.lr
    if config is not None:
        patch_model(run.model, config, seed=seed)
    fit(run, seed, args.steps)
    return held_out_loss(run)


def losses(job: Job, config: CompressionConfig | str | None, args: argparse.Namespace) -> list[float]:
    """Held-out losses of all seeds; of the first one for lossless presets."""
    lossless = config is not None and (PRESETS[config] if isinstance(config, str) else config).lossless
    return [final_loss(job, config, seed, args) for seed in range(1 if lossless else args.seeds)]


def measure(job: Job, row: str, args: argparse.Namespace, parts: Sequence[str]) -> dict[str, Any]:
    """One row of the table, or parts of it."""
    config = config_of(row, job) if row != "stock" else None
    result: dict[str, Any] = {}
    if "bytes" in parts:
        model = without_dropout(copy.deepcopy(job.model)).train().bfloat16()
        result["kept_h"] = kept_h(model, next(job.batches(0, 1)), config or "exact", stock=config is None)
    if "errors" in parts:
        result |= gradient_errors(job, config, args.batches)
    if "times" in parts:
        result["step_ratio"] = step_ratio(job, config, args.rounds) if config is not None else 1.0
    if "losses" in parts:
        result["losses"] = losses(job, config, args)
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
    parts = {row: args.renew if row in results["rows"] else PARTS for row in ("stock", *args.presets)}
    missing = [row for row, found in parts.items() if found]
    if not missing:
        return
    results["command" if any(parts[row] == PARTS for row in missing) else "renewed"] = args.command
    job = make_job(name, args.steps)
    if "bf16_errors" not in results or "errors" in args.renew:
        results["bf16_errors"] = bf16_errors(job, args.batches)
    for row in tqdm(missing, desc=name):
        earlier = results["rows"].get(row, {})
        measured = results["rows"] | {row: earlier | measure(job, row, args, parts[row])}
        results["rows"] = {name: measured[name] for name in ROWS if name in measured}
        path.write_text(json.dumps(results, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and write the reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--presets", nargs="+", choices=ROWS[1:], default=list(ROWS[1:]))
    parser.add_argument("--seeds", type=positive(int), default=5)
    parser.add_argument("--steps", type=positive(int), default=300, help="of each training, and of the one before it")
    parser.add_argument("--passes", type=positive(int), default=3, help="over the sequences of a training")
    parser.add_argument("--rounds", type=positive(int), default=15, help="timed steps of each model")
    parser.add_argument("--batches", type=positive(int), default=6, help="on which gradient errors are measured")
    again = "parts of rows of an earlier run that are measured again"
    parser.add_argument("--renew", nargs="+", choices=PARTS, default=[], help=again)
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
