"""`python -m tests.corners`: the subset of the tests that is run at the corners of the supported range of versions.

Run it once in an environment of each corner (tests/README.md says how to make them). It adds a row to
`tests/results/corners.json` and writes the table `corners.md` beside it; a row of the same versions and files is
replaced. With `--newest` it makes an environment of its own, in a temporary folder: this interpreter's torch, and of
everything else the newest that pip finds, without constraints.txt. The files that a new release of transformers is
most likely to break run there, in less than ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

HERE = Path(__file__).parent
ROOT = HERE.parent
SUBSET = (
    "models/test_families.py",
    "models/test_attention_names.py",
    "models/test_inner_models.py",
    "models/test_loss_head.py",
    "models/test_probes.py",
    "models/test_rope.py",
    "layers",
    "memory/test_compiled.py",
    "memory/test_plan*.py",
    "modules",
    "ops/test_contract.py",
    "records",
    "integration/test_compile*.py",
    "integration/test_peft.py",
    "test_patched_models.py",
    "test_patching.py",
    "test_private_apis.py",
    "test_serialization.py",
)
# the ones that say most about a new release of transformers
NEWEST = (
    "models/test_families.py",
    "models/test_attention_names.py",
    "models/test_loss_head.py",
    "models/test_rope.py",
    "layers/test_checkpoint.py",
    "layers/test_layer_types.py",
    "layers/test_leaf_by_leaf.py",
    "layers/test_layers.py",
    "integration/test_checkpointing.py",
    "test_patching.py",
    "test_private_apis.py",
    "test_serialization.py",
)
NAMES = {SUBSET: "corner", NEWEST: "newest"}
# what rows of before have no field for
DEFAULTS = {"files": "corner", "days": "all"}
Row = dict[str, Any]


class Counts:
    """A pytest plugin that counts outcomes and notes which tests failed."""

    def __init__(self) -> None:
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            self.failures.append(report.nodeid)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests and add their row. Returns the exit status: 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of corners.json and corners.md")
    parser.add_argument("--days", type=int, help="of the tests marked `daily`, only the cases of so many days")
    parser.add_argument("--newest", action="store_true", help="in an environment of the newest packages; --days 1")
    parser.add_argument("--files", nargs="+", metavar="PATTERN", help="other files than the subset's, below tests/")
    parser.add_argument("--processes", type=int, default=0, help="of pytest-xdist")
    args = parser.parse_args(argv)
    if args.newest:
        return _run_newest(args)
    patterns = tuple(args.files or SUBSET)
    if args.days:
        # files that are named run whole unless this is set
        os.environ.update(ALL_CASES="", DAYS=str(args.days))
    counts = Counts()
    options = ["-q", "-p", "no:warnings", "--tb=short", *(["-n", str(args.processes)] if args.processes else [])]
    pytest.main([*options, *_found(patterns)], plugins=[counts])
    row = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "files": NAMES.get(patterns, ", ".join(patterns)),
        "days": str(args.days or "all"),
        **counts.outcomes,
        "failures": counts.failures,
        "date": datetime.now(UTC).date().isoformat(),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "corners.json"
    rows = with_row(json.loads(path.read_text()) if path.exists() else [], row)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    (args.out / "corners.md").write_text(_table(rows))
    return int(counts.outcomes["failed"] > 0)


def _found(patterns: Sequence[str]) -> list[str]:
    files: list[str] = []
    for part in patterns:
        found = sorted(HERE.glob(part))
        if not found:
            raise SystemExit(f"no file matches {part!r}, which the subset names")
        files += map(str, found)
    return files


def with_row(rows: list[Row], row: Row) -> list[Row]:
    """The rows with a new one, which replaces that of the same versions and files."""

    def key(row: Row) -> tuple[str, str, str]:
        return row["torch"], row["transformers"], row.get("files", DEFAULTS["files"])

    return sorted([*(old for old in rows if key(old) != key(row)), row], key=key)


def _run_newest(args: argparse.Namespace) -> int:
    """The same command in an environment of the newest packages."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # it may name an older transformers
    environment.pop("PYTHONPATH", None)
    options = [
        "--days",
        str(args.days or 1),
        "--processes",
        str(args.processes or 2),
        "--out",
        str(args.out.absolute()),
    ]
    with tempfile.TemporaryDirectory(prefix="newest-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q"]
        # a newer torch, or the index's own build of this one, would bring gigabytes of CUDA packages
        same = f"torch=={torch.__version__}"
        subprocess.run([*pip, same], check=True, cwd=ROOT, env=environment)
        subprocess.run([*pip, "-U", same, "-e", ".[test]"], check=True, cwd=ROOT, env=environment)
        command = [python, "-m", "tests.corners", *options, "--files", *(args.files or NEWEST)]
        return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _table(rows: list[Row]) -> str:
    columns = ("torch", "transformers", "python", "files", "passed", "failed", "skipped", "days", "date")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(str(row.get(name, DEFAULTS.get(name))) for name in columns) + " |" for row in rows]
    versions = [(f"- torch {row['torch']}, transformers {row['transformers']}", row["failures"]) for row in rows]
    failed = [f"{pair}: `{name}`" for pair, names in versions for name in names]
    about = "`python -m tests.corners --days N`; `files`: the subset for corners, or that of `--newest`;\n"
    about += "`days`: of the tests marked `daily`, how many days' cases ran"
    return "\n".join([about, "", *lines, *(["", "Failed:", *failed] if failed else []), ""])


if __name__ == "__main__":
    sys.exit(main())
