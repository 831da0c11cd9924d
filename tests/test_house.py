"""Rules for the package's source: short files and functions, documented modules, and names that match."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_imports import part_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_actcompress"
FILES = sorted(PACKAGE.rglob("*.py"))
# the number of a paper on arXiv
SOURCE = re.compile(r"\b\d{4}\.\d{5}\b")
FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 300, 40, 80


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path):
    source = path.read_text()
    assert len(source.splitlines()) < FILE_LINES
    limit = KERNEL_LINES if part_of(path.relative_to(PACKAGE).with_suffix("").parts) == "kernels" else FUNCTION_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert body_lines(node) < limit, f"{path.name}: {node.name}"


def test_files_of_recipes_and_tests_are_short():
    files = [path for folder in ("recipes", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert files
    assert not [path for path in files if len(path.read_text().splitlines()) > FILE_LINES]


def test_every_module_says_what_it_is():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_one_op_has_one_basename_in_every_layer():
    """Each kernel has a reference of the same place and name, except for code that kernels share."""
    of_all = ("common", "fallback", "grad_weight", "launch", "probe", "recorded", "timing", "watched")
    shared = {f"kernels/{name}" for name in of_all}
    shared.add("methods/fewbit/kernel_encoding")
    names = {str(path.relative_to(PACKAGE).with_suffix("")) for path in FILES}
    kernels = {name for name in names if part_of(name.split("/")) == "kernels"}
    same = {name: name.replace("kernels/", "reference/").replace("/kernel", "/reference") for name in kernels}
    alone = {name for name in kernels if same[name] not in names}
    assert alone == shared


def test_every_published_method_is_in_the_table():
    """Each folder has a row in methods/README.md with a source that its docstring names, too."""
    rows = (PACKAGE / "methods" / "README.md").read_text().splitlines()
    for folder in {path.parent for path in (PACKAGE / "methods").glob("*/*.py")}:
        sources = set(SOURCE.findall((folder / "__init__.py").read_text()))
        found = [set(SOURCE.findall(row)) for row in rows if row.startswith("|") and f"`{folder.name}`" in row]
        assert sources and sources == set().union(*found), folder.name


def test_no_two_modules_have_a_class_of_one_name():
    """A class's name in a traceback then says which class it is. Private classes are not checked."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
