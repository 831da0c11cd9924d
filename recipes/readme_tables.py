"""Put the measured tables into README.md: what stands between two markers is the table of a results file.

    python recipes/readme_tables.py           # after recipes/benchmark.py or recipes/evaluate_presets.py
    python recipes/readme_tables.py --check   # fails where README.md and the results differ

A marker names the file, and the heading under which the table stands where the file has several:
`<!-- table: recipes/results/cpu/evaluation.md minilm -->`, up to `<!-- end of table -->`.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- table: (\S+?)(?: (\S+?))? -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table(text: str, heading: str | None) -> str:
    """The first table of a markdown text, or the first below a heading."""
    lines = text.splitlines()
    if heading is not None:
        lines = lines[lines.index(f"## {heading}") :]
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i, line in enumerate(lines) if i > start and not line.startswith("|")), len(lines))
    return "\n".join(lines[start:end])


def filled(readme: str) -> str:
    """README.md with every table as its results file has it."""
    return BLOCK.sub(lambda m: f"{m[1]}{table((ROOT / m[2]).read_text(), m[3])}\n{m[4]}", readme)


def main(argv: Sequence[str] | None = None) -> int:
    """Write README.md, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table differs")
    args = parser.parse_args(argv)
    path = ROOT / "README.md"
    before = path.read_text()
    after = filled(before)
    if not args.check:
        path.write_text(after)
    return int(args.check and after != before)


if __name__ == "__main__":
    sys.exit(main())
