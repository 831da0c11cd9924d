"""`python -m tests.corners`: the subset of the tests that is run at the corners of the supported range of versions.

Run it once in an environment of each corner (tests/README.md says how to make them). It adds a row to
`tests/results/corners.json` and writes the table `corners.md` beside it; a row of the same versions is replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

HERE = Path(__file__).parent
SUBSET = (
    "models/test_families.py",
    "models/test_attention_names.py",
    "models/test_inner_models.py",
    "models/test_loss_head.py",
    "models/test_probes.py",
    "models/test_rope.py",
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of corners.json and corners.md")
    parser.add_argument("--days", type=int, help="of the tests marked `daily`, only the cases of so many days")
    args = parser.parse_args()
    out: Path = args.out
    if args.days:
        # files that are named run whole unless this is set
        os.environ.update(ALL_CASES="", DAYS=str(args.days))
    counts = Counts()
    files = []
    for part in SUBSET:
        found = sorted(HERE.glob(part))
        if not found:
            raise SystemExit(f"no file matches {part!r}, which the subset names")
        files += map(str, found)
    pytest.main(["-q", "-p", "no:warnings", "--tb=short", *files], plugins=[counts])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    row = {
        **versions,
        "python": platform.python_version(),
        "days": str(args.days or "all"),
        **counts.outcomes,
        "failures": counts.failures,
        "date": datetime.now(UTC).date().isoformat(),
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / "corners.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    rows = [old for old in rows if any(old[name] != version for name, version in versions.items())] + [row]
    rows.sort(key=lambda row: (row["torch"], row["transformers"]))
    path.write_text(json.dumps(rows, indent=1) + "\n")
    (out / "corners.md").write_text(_table(rows))


def _table(rows: list[dict[str, Any]]) -> str:
    columns = ("torch", "transformers", "python", "passed", "failed", "skipped", "days", "date")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(str(row.get(name, "all")) for name in columns) + " |" for row in rows]
    versions = [(f"- torch {row['torch']}, transformers {row['transformers']}", row["failures"]) for row in rows]
    failed = [f"{pair}: `{name}`" for pair, names in versions for name in names]
    about = "`python -m tests.corners --days N`; `days`: of the tests marked `daily`, how many days' cases ran"
    return "\n".join([about, "", *lines, *(["", "Failed:", *failed] if failed else []), ""])


if __name__ == "__main__":
    main()
