"""Fine-tuning on chosen tokens, compared with full tuning and LoRA: bytes kept, step time, held-out loss over seeds.

    python recipes/chosen_tokens.py                                  # three jobs and seeds: 15 minutes on two cores
    python recipes/chosen_tokens.py --jobs llama --seeds 1 --steps 50

The jobs are two of `evaluate_presets.py`, a pretrained MiniLM (classification) and a Llama-like model that is trained
here first (language modelling), and "completion". This is the second job with labels only for the end of each sequence,
as in tuning on instructions. Kept bytes are those of the layers in bf16 under the preset `exact`. Step times are
medians of interleaved steps on this machine, divided by full tuning's. A row's difference is the mean, over seeds, of
its held-out loss minus that of full tuning from the same seed, with its 95% interval. Below the table is the spread
(standard deviation) of full tuning's own losses over the seeds. Tokens are chosen by their loss where each has one.
Writes chosen_tokens.json and .md; other jobs of an earlier run with the same settings and versions stay in them.
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
from common.data import Example
from common.evaluation_report import interval
from common.jobs import Job, fit, held_out_loss, make_job
from common.models import without_dropout
from common.options import positive
from common.state import IGNORE
from peft import LoraConfig, get_peft_model
from tqdm.auto import tqdm

from hf_actcompress import CompressionConfig, memory_report, patch_model

JOBS = ("minilm", "llama", "completion")
# the share of each sequence that has labels in the job "completion"
COMPLETION = 0.3
FULL, LORA = "full tuning", "LoRA, rank 8"
# adapters of rank 8 need a higher learning rate than full tuning, by this factor
LORA_RATE = 10.0


def rows(name: str, shares: Sequence[float]) -> dict[str, CompressionConfig]:
    """The name of each row of a job, and how the model is patched."""
    found = {FULL: CompressionConfig(), LORA: CompressionConfig()}
    for share in shares:
        for choice in ("random", "last") if name == "minilm" else ("random", "last", "loss"):
            found[f"tokens={share}, {choice}"] = CompressionConfig(tokens=share, token_choice=choice)
    return found


def job_named(name: str, steps: int) -> Job:
    """One of the JOBS, its model ready to be fine-tuned."""
    if name != "completion":
        return make_job(name, steps)
    job = make_job("llama", steps)
    job.train, job.held_out = [completion(row) for row in job.train], [completion(row) for row in job.held_out]
    return job


def completion(batch: Example) -> Example:
    """The same tokens, with labels for the last ones only."""
    labels = batch["labels"].clone()
    labels[..., : -int(COMPLETION * labels.size(-1))] = IGNORE
    return {**batch, "labels": labels}


def job_of(job: Job, row: str) -> Job:
    """A copy of the job with its own model, which has adapters if the row says so."""
    found = copy.copy(job)
    found.model = copy.deepcopy(job.model)
    if row == LORA:
        head = ["classifier"] if job.name == "minilm" else None
        settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=head)
        found.model, found.lr = get_peft_model(found.model, settings), LORA_RATE * job.lr
    return found


def kept_h(job: Job, config: CompressionConfig) -> float:
    """Bytes per token and layer over the hidden size, in bf16."""
    model = without_dropout(copy.deepcopy(job.model)).bfloat16().train()
    report = memory_report(model, next(job.batches(0, 1)), config)
    return report.layer_patched_bytes / (report.layer_tokens * report.hidden_size)


def step_times(job: Job, configs: dict[str, CompressionConfig], rounds: int) -> dict[str, float]:
    """For each row, the median time of a forward and backward divided by full tuning's; all rows take turns."""
    batch = next(job.batches(0, 1))
    models = {row: patch_model(job_of(job, row).model.train(), config) for row, config in configs.items()}
    times: dict[str, list[float]] = {row: [] for row in models}
    for _ in range(rounds + 2):  # two to warm up
        for row, model in models.items():
            began = time.perf_counter()
            model(**batch).loss.backward()
            times[row].append(time.perf_counter() - began)
    medians = {row: statistics.median(of_row[2:]) for row, of_row in times.items()}
    return {row: median / medians[FULL] for row, median in medians.items()}


def loss_after(job: Job, row: str, config: CompressionConfig, seed: int, steps: int) -> float:
    """Held-out loss after a fine-tune."""
    torch.manual_seed(seed)
    run = job_of(job, row)
    patch_model(run.model, config, seed=seed)
    fit(run, seed, steps)
    return held_out_loss(run)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All rows of one job."""
    job, configs = job_named(name, args.steps), rows(name, args.shares)
    times = step_times(job, configs, args.rounds)
    found: dict[str, Any] = {}
    for row, config in tqdm(configs.items(), desc=name):
        losses = [loss_after(job, row, config, seed, args.steps) for seed in range(args.seeds)]
        found[row] = {"kept_h": kept_h(job_of(job, row), config), "step_ratio": times[row], "losses": losses}
    return found


def earlier_jobs(path: Path, settings: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The jobs that an earlier run with the same settings has written, and their commands."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    same = {key: found.get(key) for key in settings} == settings
    return (dict(found["commands"]), dict(found["jobs"])) if same else ({}, {})


def table(found: dict[str, Any]) -> str:
    """One job as markdown."""
    full = found[FULL]["losses"]
    lines = [
        "| row | kept, h per token and layer | step time | held-out loss | less full tuning's |",
        "|---|---:|---:|---:|---:|",
    ]
    for row, result in found.items():
        differences = [ours - theirs for ours, theirs in zip(result["losses"], full, strict=True)]
        lines.append(
            f"| {row} | {result['kept_h']:.1f} | {result['step_ratio']:.2f} | {statistics.mean(result['losses']):.3f} "
            f"| {statistics.mean(differences):+.3f} ± {interval(differences) or 0:.3f} |"
        )
    spread = statistics.stdev(full) if len(full) > 1 else float("nan")
    return "\n".join(lines) + f"\n\nSpread of full tuning's loss over {len(full)} seeds: {spread:.3f}.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--shares", nargs="+", type=float, default=[0.3])
    parser.add_argument("--seeds", type=positive(int), default=3)
    parser.add_argument("--steps", type=positive(int), default=300, help="of each training, and of the one before it")
    parser.add_argument("--rounds", type=positive(int), default=15, help="timed steps of each row")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/chosen_tokens"))
    args = parser.parse_args(argv)
    args.output_dir.mkdir(parents=True, exist_ok=True)
    command = f"python recipes/chosen_tokens.py {' '.join(sys.argv[1:] if argv is None else argv)}".strip()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    settings = {"versions": versions, "seeds": args.seeds, "steps": args.steps}
    commands, jobs = earlier_jobs(args.output_dir / "chosen_tokens.json", settings)
    commands |= dict.fromkeys(args.jobs, command)
    jobs |= {name: measure(name, args) for name in args.jobs}
    jobs = {name: jobs[name] for name in JOBS if name in jobs}
    results = {"commands": commands, **settings, "jobs": jobs}
    (args.output_dir / "chosen_tokens.json").write_text(json.dumps(results, indent=2) + "\n")
    parts = [f"## {name}\n\n`{commands[name]}`, {args.steps} steps\n\n{table(found)}" for name, found in jobs.items()]
    text = "# Chosen tokens\n\n" + "\n".join(parts)
    (args.output_dir / "chosen_tokens.md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
