"""Compares what papers on activation memory claim with what this package measures in their place.

    python recipes/reproduce.py --list
    python recipes/reproduce.py --paper actnn
    python recipes/reproduce.py --paper all          # ten minutes on a busy CPU
    python recipes/reproduce.py --paper all --full   # larger batches, on a GPU

Each claim has its source, our setting, our number and a verdict: "reproduced" where ours is at least nine tenths of the
claimed saving; "not reproduced"; or "not comparable here", with the reason. Claims are in our words, and about memory:
what the methods do to accuracy is in the table of recipes/finetune_image.py. Every number of ours is measured by the
run. Beside it is what `exact` alone saves in the same setting, because the methods' presets rebuild the same tensors.
Where dropout is on, a CPU keeps masks in fp32; they are counted as one byte per element, as CUDA keeps them.
Writes reproduce.json, .md and .png; results of an earlier run at the same scale for other papers stay in them.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from common.bench_report import environment
from common.files import replace_text
from common.paper_report import Row, markdown, plot, readable, verdict
from common.paper_settings import SCALES, Scale
from common.papers import PAPERS, WITHOUT_ROW


def measure(name: str, scale: Scale, command: str) -> list[Row]:
    """Every claim of one paper."""
    rows = []
    for claim in PAPERS[name].claims:
        began = time.process_time()
        ours = claim.measure(scale)
        seconds = time.process_time() - began
        exact = None if claim.method_alone else claim.measure(scale, "exact")
        said, reason = verdict(claim, ours)
        title, figure = PAPERS[name].title, claim.figure
        rows.append(
            Row(
                name, title, claim.text, claim.source, claim.setting, claim.unit, figure, ours, said, reason, command,
                seconds, exact,
            )
        )  # fmt: skip
        beside = "" if exact is None else f" ({readable(exact, claim.unit)} by exact alone)"
        here = f"{readable(ours, claim.unit)} here{beside}"
        print(f"{title}: {readable(figure, claim.unit)} claimed, {here}: {said}", flush=True)
    return rows


def earlier_rows(path: Path, scale: Scale) -> list[Row]:
    """The rows that an earlier run at the same scale has written."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    if found.get("scale") != asdict(scale):
        return []
    return [Row(**row) for row in found["rows"]]


def list_papers() -> None:
    for name, paper in PAPERS.items():
        print(f"{name}: {paper.title}{f' (arXiv {paper.arxiv})' if paper.arxiv else ''}")
        for claim in paper.claims:
            print(f"    {claim.text} ({claim.source})")
    print("without a row:")
    for name, why in WITHOUT_ROW.items():
        print(f"    {name}: {why}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; the exit status says nothing about the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paper", nargs="+", choices=[*PAPERS, "all"], default=["all"])
    parser.add_argument("--list", action="store_true", help="the papers and their claims; measures nothing")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="on a GPU, with larger batches")
    size.add_argument("--quick", action="store_true", help="tiny models: shows that it runs, and nothing else")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/reproduce"))
    args = parser.parse_args(argv)
    if args.list:
        list_papers()
        return 0
    scale = SCALES["full" if args.full else "quick" if args.quick else "default"]
    command = shlex.join(["python", "recipes/reproduce.py", *(sys.argv[1:] if argv is None else argv)])
    about = environment(scale.device, command, vars(args))
    rows = [row for row in earlier_rows(args.output_dir / "reproduce.json", scale) if row.paper in PAPERS]
    for name in PAPERS if "all" in args.paper else args.paper:
        rows = [row for row in rows if row.paper != name] + measure(name, scale, command)
        rows.sort(key=lambda row: list(PAPERS).index(row.paper))
        record = {**about, "scale": asdict(scale), "rows": [asdict(row) for row in rows]}
        replace_text(args.output_dir / "reproduce.json", json.dumps(record, indent=2) + "\n")
        replace_text(args.output_dir / "reproduce.md", markdown(rows, about))
    drawn = plot(rows, args.output_dir / "reproduce.png", args.output_dir / "reproduce.json")
    print(f"Written: reproduce.json, reproduce.md{' and reproduce.png' if drawn else ''} in {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
