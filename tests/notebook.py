"""Run the notebook of the recipes and store in it what its cells print: `python -m tests.notebook`."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "recipes" / "first_steps.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run the code cells in one namespace, as a kernel does, and put what each prints into its outputs.

    Only stdout is stored: warnings name paths of this machine.

    Returns:
        The namespace that the cells leave.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for count, cell in enumerate(cells, start=1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"cell {count}", "exec"), names)
        lines = printed.getvalue().splitlines(keepends=True)
        stored = [{"name": "stdout", "output_type": "stream", "text": lines}]
        cell |= {"execution_count": count, "outputs": stored if lines else []}
    return names


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    notebook = json.loads(NOTEBOOK.read_text())
    executed(notebook)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
