"""What a packed batch costs, one row of many sequences: a stock Llama, a patched one, and stock on separate rows.

    python recipes/packed_batches.py
    python recipes/packed_batches.py --device cuda --dtype bfloat16 --model llama-1b --sequences 16 --length 2048

The positions start again with each sequence, as transformers' DataCollatorWithFlattening and TRL's packing make them,
so that stock makes a mask of all tokens by all tokens. Kept bytes are those between forward and backward, the peak is
that of a step without its optimizer. Writes packed.json and packed.md.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from common.bench_models import FAMILIES, SHAPES, shape_of
from common.bench_report import environment
from common.files import replace_text

from hf_actcompress import kept_bytes, measure_step, patch_model

MODES = ("stock", "patched", "stock, separate rows")
COLUMNS = ("mode", "kept MiB", "peak MiB", "seconds")
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One mode; the time of a step is the median of the rounds."""

    mode: str
    kept_bytes: int
    peak_bytes: int
    seconds: float


def make_batch(mode: str, args: argparse.Namespace, vocab: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, vocab, (args.sequences, args.length), generator=torch.Generator().manual_seed(1))
    labels, positions = ids.clone(), torch.arange(args.length).expand_as(ids)
    labels[:, 0] = -100
    batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
    shape = ids.shape if "separate" in mode else (1, -1)
    return {name: x.reshape(shape).to(args.device) for name, x in batch.items()}


def measure(mode: str, args: argparse.Namespace) -> Row:
    family, shape = shape_of(args.model, args)
    torch.manual_seed(0)
    model: Any = FAMILIES[family](shape, args.length).to(args.device, getattr(torch, args.dtype)).train()
    if mode == "patched":
        patch_model(model)
    batch = make_batch(mode, args, shape.vocab)

    def step() -> None:
        model(**batch).loss.backward()

    def seconds() -> float:
        began = time.perf_counter()
        step()
        if args.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    step()
    kept = kept_bytes(lambda: model(**batch).loss, args.device)
    peak = measure_step(step, args.device).peak_bytes
    return Row(mode, kept, peak, statistics.median(seconds() for _ in range(args.rounds)))


def markdown(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = [f"`{about['command']}`", "", f"{about['device']}, torch {about['torch']}, "]
    lines[-1] += f"transformers {about['transformers']}"
    lines += ["", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        lines.append(f"| {row.mode} | {row.kept_bytes / MIB:.1f} | {row.peak_bytes / MIB:.1f} | {row.seconds:.2f} |")
    return "\n".join(lines) + "\n"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    llamas = ["llama", *(name for name, (family, _) in SHAPES.items() if family == "llama")]
    parser.add_argument("--model", choices=llamas, default="llama")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=256, help="of a model without a published shape")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    parser.add_argument("--quick", action="store_true", help="4 sequences of 64 tokens, hidden 64, one round")
    args = parser.parse_args(argv)
    if args.quick:
        args.sequences, args.length, args.hidden, args.rounds = 4, 64, 64, 1
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    command = shlex.join(["python", "recipes/packed_batches.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(args.device, command, vars(args))
    rows = [measure(mode, args) for mode in MODES]
    record = {**about, "rows": [asdict(row) for row in rows]}
    replace_text(args.out / "packed.json", json.dumps(record, indent=2, default=str) + "\n")
    replace_text(args.out / "packed.md", markdown(rows, about))
    print(markdown(rows, about))
    return 0


if __name__ == "__main__":
    sys.exit(main())
