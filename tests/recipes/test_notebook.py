"""The notebook runs from its first cell to its last, and its results agree with its text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "recipes" / "first_steps.ipynb"
# runs the code cells in one namespace, as a kernel does, and prints what they leave there
DRIVER = """
import json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
names = {"__name__": "__main__"}
for index, cell in enumerate(cells):
    exec(compile("".join(cell["source"]), f"cell {index}", "exec"), names)
names["said"] = names["report"].stock_bytes, names["report"].patched_bytes
wanted = "before", "after", "said", "stock_loss", "losses", "needs", "card"
print(json.dumps({name: names[name] for name in wanted}))
"""


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    command = [sys.executable, "-c", DRIVER, str(NOTEBOOK)]
    environment = {**os.environ, "PYTHONPATH": str(NOTEBOOK.parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["after"] < 0.6 * found["before"]
    # what the report adds up is what the allocator counts
    assert [found["before"], found["after"]] == pytest.approx(found["said"], rel=0.05)
    assert found["losses"][0] == pytest.approx(found["stock_loss"], rel=1e-6)
    assert found["losses"][-1] < found["losses"][0]
    assert found["needs"]["int8"] < found["needs"]["exact"] < found["card"] < found["needs"]["stock"]


def test_the_notebook_is_saved_without_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert not [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")]
