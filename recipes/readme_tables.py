"""Put measured results into the README files: the text between two markers comes from a results file.

    python recipes/readme_tables.py           # after recipes/benchmark.py, evaluate_presets.py or block_picture.py
    python recipes/readme_tables.py --check   # fails where a README and the results differ

`<!-- table: recipes/results/cpu/evaluation.md minilm -->` ... `<!-- end of table -->` is the table of a file. If the
file has several, the heading under which the table stands follows the file's name. Names of columns may follow, each
after a semicolon: then only these are taken.
`<!-- text: recipes/results/readme/block.txt -->` ... `<!-- end of text -->` is a whole file as it is.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = re.compile(
    r"(<!-- table: ([^\s;]+)(?: ([^\s;]+))?((?:; [^;\n]+?)*) -->\n).*?(<!-- end of table -->)", re.DOTALL
)
TEXT = re.compile(r"(<!-- text: (\S+?) -->\n).*?(<!-- end of text -->)", re.DOTALL)


def documents() -> list[Path]:
    """README.md, and the README.md of every folder of the package and of the recipes."""
    folders = (ROOT / "hf_actcompress", ROOT / "recipes")
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("README.md")))]


def table(text: str, heading: str | None, columns: Sequence[str] = ()) -> str:
    """The first table of a markdown text, or the first below a heading; of all columns or of some."""
    lines = text.splitlines()
    if heading is not None:
        lines = lines[lines.index(f"## {heading}") :]
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next((i for i, line in enumerate(lines) if i > start and not line.startswith("|")), len(lines))
    if not columns:
        return "\n".join(lines[start:end])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    chosen = [rows[0].index(name) for name in columns]
    return "\n".join(f"| {' | '.join(row[i] for i in chosen)} |" for row in rows)


def filled(readme: str) -> str:
    """The text of a README, in which every table and text is replaced by that of its results file."""
    readme = TABLE.sub(
        lambda m: f"{m[1]}{table((ROOT / m[2]).read_text(), m[3], m[4].split('; ')[1:])}\n{m[5]}", readme
    )
    return TEXT.sub(lambda m: f"{m[1]}```text\n{(ROOT / m[2]).read_text()}```\n{m[3]}", readme)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the README files, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if anything differs")
    args = parser.parse_args(argv)
    different = False
    for path in documents():
        before = path.read_text()
        after = filled(before)
        different = different or after != before
        if not args.check:
            path.write_text(after)
    return int(args.check and different)


if __name__ == "__main__":
    sys.exit(main())
