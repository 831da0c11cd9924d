"""The import graph in CONTRIBUTING.md: which part of the package imports which other part.

    python -m tests.import_graph           # run it after a new part or a new import; it writes CONTRIBUTING.md
    python -m tests.import_graph --check   # fails if the graph in CONTRIBUTING.md is not that of the code

An arrow that follows from others is left out: an arrow from `ops` to `dispatch` says nothing new if `ops` imports
`records`, `records` imports `codecs` and `codecs` imports `dispatch`. Imports for type checking count.
"""

from __future__ import annotations

import argparse
import re
import sys

from tests.test_imports import LEVEL, NAME, ROOT, imported, modules, part_of

PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = re.compile(r"(<!-- import graph -->\n).*?(<!-- end of import graph -->)", re.DOTALL)

Graph = dict[str, set[str]]


def import_graph() -> Graph:
    """For each part of the package, the other parts that it imports."""
    graph: Graph = {part: set() for part in LEVEL}
    for path, part, tree in modules():
        for _, name in imported(path, tree):
            head, *rest = name.split(".")
            target = part_of(rest) if head == NAME and rest else part
            if target in LEVEL and target != part:
                graph[part].add(target)
    return graph


def reduced(graph: Graph) -> Graph:
    """The graph without the arrows that follow from others."""
    below: Graph = {}
    for part in sorted(graph, key=lambda part: LEVEL[part]):
        below[part] = set().union(graph[part], *(below[other] for other in graph[part]))
    return {part: others - set().union(*(below[other] for other in others)) for part, others in graph.items()}


def mermaid(graph: Graph) -> str:
    """The graph as a mermaid flowchart, from the top of the package down."""
    parts = sorted(graph, key=lambda part: (-LEVEL[part], part))
    lines = [f"  {part} --> {other}" for part in parts for other in sorted(graph[part])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def filled(page: str) -> str:
    """The text of CONTRIBUTING.md with the import graph of the present code."""
    return BLOCK.sub(lambda m: f"{m[1]}{mermaid(reduced(import_graph()))}\n{m[2]}", page)


def main() -> int:
    """Write CONTRIBUTING.md, or compare only. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the picture differs")
    args = parser.parse_args()
    before = PAGE.read_text()
    after = filled(before)
    if not args.check:
        PAGE.write_text(after)
    return int(args.check and after != before)


if __name__ == "__main__":
    sys.exit(main())
