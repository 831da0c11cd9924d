"""The gradient errors of presets in units of what bf16 does to the gradients of the same batches, counted in six ways.

    python recipes/bf16_errors.py --out recipes/results/bf16      # four minutes on one core

The model is MiniLM, which learns from which package a function comes, without dropout. The unit is the error of bf16
autocast over fp32 weights, or of a model whose weights are in bf16. An error is the norm of the difference over the
norm of the exact gradient, of all parameters as one vector; "encoder" is that of the layers alone, without embeddings
and the head, and "median parameter" the median of the parameters' own ratios. The other rows have longer sequences, of
which a quarter is padding, larger batches, and the model after a training. Each figure is the median of --batches
batches, with their range. Writes bf16_errors.json and .md.
"""

import argparse
import copy
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common.bench_report import environment
from common.bf16 import WAYS, Gradients, error, gradients
from common.evaluation_report import ratios
from common.files import replace_text
from common.jobs import Job, fit, minilm
from common.models import without_dropout
from common.options import positive

from hf_actcompress import PRESETS, patch_model

STEPS = 100  # of the training


def trained(job: Job) -> Job:
    """The job with its model after a training, all parameters of which take gradients."""
    job.model = copy.deepcopy(job.model)
    fit(job, 0, STEPS)
    job.model.requires_grad_(True)
    return job


Counted = Callable[[Gradients, Gradients], list[float]]


def whole(found: Gradients, exact: Gradients) -> list[float]:
    return [error(found, exact)]


def encoder(found: Gradients, exact: Gradients) -> list[float]:
    return [error(found, exact, [name for name in exact if ".encoder." in name])]


def each(found: Gradients, exact: Gradients) -> list[float]:
    """The error of each parameter that has a gradient."""
    return [error(found, exact, [name]) for name in exact if exact[name].any()]


# name -> the job, and how an error is counted
SETTINGS: dict[str, tuple[Callable[[], Job], Counted]] = {
    "4 sequences of 32 tokens": (lambda: minilm(4, 32), whole),
    "encoder": (lambda: minilm(4, 32), encoder),
    "median parameter": (lambda: minilm(4, 32), each),
    "16 sequences of 32 tokens": (lambda: minilm(16, 32), whole),
    "4 sequences of 128 tokens": (lambda: minilm(4, 128), whole),
    f"after {STEPS} steps": (lambda: trained(minilm(4, 32)), whole),
}


def measure(job: Job, counted: Counted, presets: Sequence[str], batches: int) -> dict[str, Any]:
    """One row: the units on each batch, and for each preset and unit its ratio on each batch."""
    model = without_dropout(job.model).train()
    rounded = copy.deepcopy(model).bfloat16()
    patched = {preset: patch_model(copy.deepcopy(model), preset) for preset in presets}
    row: dict[str, Any] = {"units": {way: [] for way in WAYS}, "ratios": {p: {w: [] for w in WAYS} for p in presets}}
    for batch in job.batches(0, batches):
        exact = gradients(model, batch)
        found = {"autocast": gradients(model, batch, autocast=True), "weights": gradients(rounded, batch)}
        units = {way: counted(found[way], exact) for way in WAYS}
        for way in WAYS:
            row["units"][way].append(statistics.median(units[way]))
        for preset in presets:
            errors = counted(gradients(patched[preset], batch), exact)
            for way in WAYS:
                own = [a / b for a, b in zip(errors, units[way], strict=True)]
                row["ratios"][preset][way].append(statistics.median(own))
    return row


def markdown(found: dict[str, Any], about: dict[str, Any]) -> str:
    presets = about["options"]["presets"]
    columns = ["errors", *(f"bf16 {way}" for way in WAYS)]
    columns += [f"{preset}, x {way}" for preset in presets for way in WAYS]
    lines = [f"`{about['command']}`", "", f"torch {about['torch']}, transformers {about['transformers']}", ""]
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, row in found.items():
        units = [f"{statistics.median(row['units'][way]):.2%}" for way in WAYS]
        values = [row["ratios"][preset][way] for preset in presets for way in WAYS]
        lines.append(f"| {' | '.join([name, *units, *(ratios(v, [1.0] * len(v)) for v in values)])} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=["int8", "fp8", "int4"])
    parser.add_argument("--batches", type=positive(int), default=6)
    parser.add_argument("--out", type=Path, default=Path("runs/bf16_errors"))
    args = parser.parse_args(argv)
    command = shlex.join(["python", "recipes/bf16_errors.py", *(sys.argv[1:] if argv is None else argv)])
    about, found = environment("cpu", command, vars(args)), {}
    for name in args.settings:
        build, counted = SETTINGS[name]
        torch.manual_seed(0)
        found[name] = measure(build(), counted, args.presets, args.batches)
        replace_text(args.out / "bf16_errors.json", json.dumps({**about, "rows": found}, indent=2) + "\n")
        replace_text(args.out / "bf16_errors.md", markdown(found, about))
    print(markdown(found, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
