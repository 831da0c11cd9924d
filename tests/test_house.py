"""Rules for the package's source: short files and functions, documented modules, and names that match."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_actcompress"
FILES = sorted(PACKAGE.rglob("*.py"))
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
    limit = KERNEL_LINES if "kernels" in path.relative_to(PACKAGE).parts else FUNCTION_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert body_lines(node) < limit, f"{path.name}: {node.name}"


def test_every_module_says_what_it_is():
    for path in FILES:
        tree = ast.parse(path.read_text())
        assert not tree.body or ast.get_docstring(tree), path


def test_one_op_has_one_basename_in_every_layer():
    """Each file of kernels/ has a file of the same place and name in reference/, except for code that kernels share."""
    shared = {"common", "fallback", "grad_weight", "methods/fewbit_encoding", "probe", "timing"}
    reference, kernels = (
        {path.relative_to(PACKAGE / layer).with_suffix("") for path in (PACKAGE / layer).rglob("*.py")}
        for layer in ("reference", "kernels")
    )
    assert not {str(name) for name in kernels - reference} - shared


def test_every_file_of_a_published_method_is_in_the_readmes_table():
    table = (PACKAGE / "README.md").read_text()
    files = [path for path in FILES if "methods" in path.relative_to(PACKAGE).parts and path.stem != "__init__"]
    assert not [path for path in files if f"{path.stem}`" not in table]


def test_no_two_modules_have_a_class_of_one_name():
    """A class's name in a traceback then says which class it is. Private classes are not checked."""
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
