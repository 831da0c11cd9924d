"""Patched models against stock at the widths that people train: equal losses, and gradients within their bound.

    python recipes/compare_families.py --device cuda --out results/
    python recipes/compare_families.py --quick                      # a CPU: two widths, few families

Runs each model type with few layers at each width, in fp32, bf16, fp16 and under bf16 autocast. Patching promises that
forward values are stock's bits, and that gradients are stock's bits or as close to the true ones as stock's are: over
all parameters, ||ours - true|| <= 1.1 ||stock - true||, with the true ones from fp64. Writes families.jsonl after each
row, families.md after each model type, and ends with status 1 if one row breaks the promise.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_report import environment
from common.files import replace_text
from common.wide_families import FAMILIES, Family
from torch import Tensor
from tqdm import tqdm

from hf_actcompress import patch_model

LAW = 1.1
MODES = ("fp32", "bf16", "fp16", "autocast")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}
COLUMNS = (
    "model type",
    "width",
    "mode",
    "as promised",
    "loss",
    "equal gradients",
    "our error",
    "stock's error",
    "note",
)
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """One model type at one width in one mode. Errors are relative L2 norms against fp64; None where all bits agree."""

    family: str
    width: int
    mode: str
    good: bool
    loss_equal: bool = False
    equal_gradients: int = 0
    gradients: int = 0
    error: float | None = None
    stock_error: float | None = None
    note: str = ""


def step(model: Any, batch: dict[str, Tensor], mode: str) -> tuple[Tensor, Gradients]:
    """The loss and all gradients of one training step, without dropout."""
    model.zero_grad(set_to_none=True)
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=mode == "autocast"):
        loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative_error(found: Gradients, truth: Gradients) -> float:
    """||found - truth|| / ||truth|| over all parameters, added up in fp64."""
    error = sum(float((found[name].double() - x).square().sum()) for name, x in truth.items())
    return float((error / sum(float(x.square().sum()) for x in truth.values())) ** 0.5)


def compare(family: Family, width: int, mode: str, args: argparse.Namespace) -> Row:
    """One row: stock and patched, and both against fp64 where they differ."""
    torch.manual_seed(0)
    with torch.device(args.device):
        model = family.build(width).to(DTYPES[mode]).train()
    batch = {name: x.to(args.device) for name, x in family.batch(args.tokens).items()}
    batch = {name: x.to(DTYPES[mode]) if x.is_floating_point() else x for name, x in batch.items()}
    stock_loss, stock = step(model, batch, mode)
    ours_model = patch_model(copy.deepcopy(model))
    loss, ours = step(ours_model, batch, mode)
    del ours_model
    if ours.keys() != stock.keys():
        return Row(family.name, width, mode, False, note=f"gradients of {sorted(ours.keys() ^ stock.keys())[:3]}")
    equal = sum(torch.equal(ours[name], x) for name, x in stock.items())
    same_loss = torch.equal(loss, stock_loss)
    found: dict[str, Any] = {"loss_equal": same_loss, "equal_gradients": equal, "gradients": len(stock)}
    if equal == len(stock):
        return Row(family.name, width, mode, same_loss, **found)
    model.zero_grad(set_to_none=True)
    wide = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    truth = step(model.double(), wide, "fp64")[1]
    error, own = relative_error(ours, truth), relative_error(stock, truth)
    # a comparison with NaN is false
    return Row(family.name, width, mode, same_loss and error <= LAW * own, error=error, stock_error=own, **found)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    chosen = [family for family in FAMILIES if family.name in args.families]
    cases = [(family, width, mode) for family in chosen for width in family.widths for mode in args.modes]
    if args.quick:
        # the same code; the real widths would take hours on a CPU
        cases = [(family, width, mode) for family in chosen for width in family.quick for mode in args.modes]
    for family, width, mode in tqdm(cases, disable=None):
        try:
            yield compare(family, width, mode, args)
        except Exception as error:
            # a model that fails becomes a row, and the others still run
            yield Row(family.name, width, mode, False, note=f"{type(error).__name__}: {str(error)[:160]}")
        if args.device == "cuda":
            torch.cuda.empty_cache()


def markdown(found: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [
        f"`{about['command']}`", "",
        f"{about['device']}, torch {about['torch']}, transformers {about['transformers']}, triton {about['triton']}, "
        f"{about['hf-actcompress']}; {about['options']['tokens']} tokens", "",
        f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|",
    ]  # fmt: skip
    for row in found:
        errors = [f"{x:.2e}" if x is not None else "-" for x in (row.error, row.stock_error)]
        loss = "equal" if row.loss_equal else "differs"
        equal = f"{row.equal_gradients} of {row.gradients}"
        cells = [row.family, str(row.width), row.mode, "yes" if row.good else "NO", loss, equal, *errors, row.note]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--families", nargs="+", choices=names, default=names)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, default=509, help="of the whole batch; odd, so that no tile fits")
    parser.add_argument("--quick", action="store_true", help="small widths, 33 tokens")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine or this torch has no CUDA device")
    if args.quick:
        args.tokens = 33
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "recipes/compare_families.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    found: list[Row] = []
    for row in rows(args):
        found.append(row)
        replace_text(args.out / "families.jsonl", "".join(json.dumps({**asdict(r), **about}) + "\n" for r in found))
        replace_text(args.out / "families.md", markdown(found, about))
    print(markdown(found, about))
    return int(not all(row.good for row in found))


if __name__ == "__main__":
    sys.exit(main())
