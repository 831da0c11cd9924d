"""Imports point in one direction, large libraries are imported only in some parts, and triton is never needed."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import hf_actcompress

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_actcompress"
NAME = PACKAGE.name
# what describes the methods: no code
HEADS = {PACKAGE / "methods" / "__init__.py", *(PACKAGE / "methods").glob("*/__init__.py")}

# a part imports only from itself and from lower levels; parts of the same level do not import each other
LEVELS: tuple[tuple[str, ...], ...] = (
    ("compiling",),
    ("errors", "garbage", "private_apis", "roles", "versions"),
    ("config_file",),
    # a formula over data, which imports no torch
    ("quick",),
    ("display",),
    ("reference",),
    # kernels read the tables and the random numbers of `reference`
    ("kernels",),
    ("dispatch",),
    ("codecs",),
    ("testing", "config_checks"),
    # records and modules put its marks into a graph that is traced
    ("compilation",),
    ("records", "config"),
    ("ops",),
    ("modules",),
    ("models",),
    ("extension",),
    ("graphs",),
    ("layers",),
    ("reporting",),
    ("patching",),
    ("memory",),
    ("training", "cli"),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

# first word of a file's name in `methods/<method>/` -> the part that the file belongs to
LAYERS = {
    "reference": "reference",
    "tables": "reference",
    "kernel": "kernels",
    "codec": "codecs",
    "op": "ops",
    "model": "models",
}

# third-party package -> where in the package it may be imported
CONFINED = {
    "transformers": ("models", "layers", "training", "memory"),
    "peft": ("models", "training"),
    "diffusers": ("memory",),
    "accelerate": ("training",),
    "triton": ("kernels",),
    "matplotlib": ("display", "training", "cli"),
    "typer": ("cli",),
}


def part_of(names: Sequence[str]) -> str:
    """The part of a module, or of a name in it, from the names below the package. A method's folder is no part."""
    if names[0] != "methods" or len(names) < 3:
        return names[0]
    return LAYERS.get(names[2].split("_")[0], ".".join(names[:3]))


@cache
def modules() -> tuple[tuple[Path, str, ast.Module], ...]:
    """Every file of the package with code: its path, the part it belongs to, and its syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    parts = {path: part_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in paths}
    found = [path for path in paths if parts[path] not in ("__init__", "__main__") and path not in HEADS]
    return tuple((path, parts[path], ast.parse(path.read_text())) for path in found)


@cache
def imported(path: Path, tree: ast.Module) -> tuple[tuple[int, str], ...]:
    """The line and the absolute dotted name of each import of a file; lazy and type-checking imports count too."""
    return tuple(_imported(path, tree))


def _imported(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{prefix}.{alias.name}") for alias in node.names)


def test_every_part_has_a_level():
    assert {part for _, part, _ in modules()} <= set(LEVEL)


def test_what_describes_the_methods_has_no_code():
    """So any file of a method can be imported first, and none brings the files of other layers with it."""
    for path in HEADS:
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree) and len(tree.body) == 1, path


def test_imports_point_one_way():
    wrong = []
    for path, part, tree in modules():
        for line, name in imported(path, tree):
            head, *rest = name.split(".")
            target = part_of(rest) if head == NAME and rest else None
            if target not in LEVEL:
                continue
            if target != part and LEVEL[target] >= LEVEL[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_no_part_imports_the_top():
    for path, _, tree in modules():
        for line, name in imported(path, tree):
            head, *rest = name.split(".")
            assert head != NAME or (rest and part_of(rest) in LEVEL) or rest == ["__version__"], f"{path}:{line} {name}"


@pytest.mark.parametrize("library", CONFINED)
def test_libraries_are_confined(library):
    wrong = []
    for path, part, tree in modules():
        for line, name in imported(path, tree):
            if name.split(".")[0] == library and part not in CONFINED[library]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}")
    assert not wrong, "\n".join(wrong)


def test_dependencies_are_those_that_are_imported():
    """Each dependency is imported. Each imported library is declared, as a dependency or in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {part: set(map(_import_name, texts)) for part, texts in project["optional-dependencies"].items()}
    base = set(map(_import_name, project["dependencies"]))
    used = {name.split(".")[0] for path, _, tree in modules() for _, name in imported(path, tree)}
    used -= {NAME, *sys.stdlib_module_names}
    assert base <= used
    assert used - base <= known["recipes"] | known["plot"] | known["gpu"] | known["stacks"]


def _import_name(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0].replace("-", "_")


# recipes that measure or compile the kernels, which are not public
ON_KERNELS = {"benchmark_kernels.py", "bytes_moved.py", "compile_kernels.py", "launch_time.py"}


def test_recipes_use_public_names_alone():
    public = set(hf_actcompress.__all__)
    wrong = []
    for path in sorted((ROOT / "recipes").rglob("*.py")):
        if path.name in ON_KERNELS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == NAME and not node.level:
                names = {alias.name for alias in node.names}
                if node.module != NAME or not names <= public:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module} {sorted(names - public)}")
            if isinstance(node, ast.Import):
                wrong.extend(f"{path}:{node.lineno}" for a in node.names if a.name.startswith(NAME + "."))
    assert not wrong, "\n".join(wrong)


def run_fresh(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_alone_is_light():
    out = run_fresh(f"import sys, {NAME}; print([m for m in ('torch', 'transformers', 'triton') if m in sys.modules])")
    assert out.strip() == "[]"


def test_trains_a_step_without_triton():
    out = run_fresh(
        """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("blocked")
sys.meta_path.insert(0, Block())
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from hf_actcompress import patch_model
config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = patch_model(LlamaForCausalLM(config))
ids = torch.arange(8)[None]
model(input_ids=ids, labels=ids).loss.backward()
assert all(p.grad is not None for p in model.parameters())
print("trained", "triton" in sys.modules)
"""
    )
    assert out.strip() == "trained False"


def _graph() -> dict[str, set[str]]:
    """For each module, the package's modules that it imports; lazy and type-checking imports count too.

    Python runs the packages around a module first, so these count, except for those that the importing module is in.
    """
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (path, tree)
        for path, _, tree in modules()
    }
    graph = {}
    for name, file in names.items():
        targets = {target for _, target in imported(*file)}
        # an imported name is either a module, or a name inside a module
        found = {target if target in names else target.rpartition(".")[0] for target in targets}
        found |= {target[: dot.start()] for target in found for dot in re.finditer(r"\.", target)}
        graph[name] = {target for target in found if target in names and not f"{name}.".startswith(f"{target}.")}
    return graph


def test_no_imports_go_round():
    """Lazy imports count too. If two modules need each other, join them, or move what both need below them."""
    graph, done = _graph(), set()

    def walk(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                walk(target, (*path, name))
            done.add(name)

    for name in graph:
        walk(name, ())


def test_no_module_is_hidden_by_a_name_of_its_package() -> None:
    """A function of a module's name would hide it: `import hf_actcompress.ops.linear` would give the function."""
    hidden = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[-1] in ("__init__", "__main__"):
            continue
        module, package = importlib.import_module(".".join(parts)), importlib.import_module(".".join(parts[:-1]))
        if getattr(package, parts[-1], module) is not module:
            hidden.append(".".join(parts))
    assert not hidden
