"""The list of private names that the package uses is complete, and all of them still exist.

If an upgrade removes a name, the failing test names it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from hf_actcompress.private_apis import PRIVATE_APIS, PrivateAPI

PACKAGE = Path(__file__).parent.parent / "hf_actcompress"
FILES = sorted(PACKAGE.rglob("*.py"))
# names with a leading underscore that belong to Python's enums, named tuples and frames
PYTHON = {"_missing_", "_value_", "_asdict", "_replace", "_getframe"}


def evaluated(name: str) -> Any:
    import torch._dispatch.python
    import torch._dynamo.backends.common
    import torch._functorch._activation_offloading
    import torch._functorch.config
    import torch._functorch.partitioners
    import torch._inductor.compile_fx
    import torch._inductor.decomposition
    import torch._inductor.fx_passes.replace_random
    import torch.fx._lazy_graph_module
    import torch.testing._internal.distributed.fake_pg
    import torch.utils._device
    import torch.utils._python_dispatch
    import torch.utils._pytree
    import transformers.integrations.moe
    import transformers.modeling_layers

    named = {"torch": torch, "transformers": transformers}
    if name.startswith("diffusers."):
        named["diffusers"] = pytest.importorskip("diffusers")
    return eval(name, named)


@pytest.mark.parametrize("api", PRIVATE_APIS, ids=lambda api: api.name)
def test_it_is_still_there(api: PrivateAPI) -> None:
    evaluated(api.name)
    assert api.purpose and re.fullmatch(r"(torch|transformers|diffusers) \d+\.\d+", api.since)


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def own_names(tree: ast.Module) -> set[str]:
    """Private names that the package defines: functions, classes, variables, and attributes of its own objects."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in [part for whole in targets for part in ast.walk(whole)]:
                if isinstance(target, ast.Name):
                    names.add(target.id)
                elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
                    names |= {target.attr} if target.value.id == "self" else set()
        elif isinstance(node, ast.ImportFrom) and node.level:
            names |= {alias.name for alias in node.names}
    return names


def test_every_private_name_is_in_the_list() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    own = set().union(*map(own_names, trees.values()))
    listed = {part for api in PRIVATE_APIS for part in re.findall(r"\b_\w+", f"{api.name} {api.purpose}")}
    unknown = []
    for path, tree in trees.items():
        for node in ast.walk(tree):
            used: list[str] = []
            if isinstance(node, ast.Attribute):
                used = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            for name in filter(private, used):
                if name not in own | listed | PYTHON:
                    unknown.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {name}")
    assert not unknown, "\n".join(unknown)


def test_what_can_be_wrapped_is_used_through_the_wrapper() -> None:
    inside = re.compile(r"torch\._C\b|_execution_engine|torch\._subclasses|torch\._fused_sdp_choice|_unsafe_view\(")
    wrong = []
    for path in FILES:
        if path.parent.name == "private_apis":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if inside.search(line):
                wrong.append(f"{path.relative_to(PACKAGE)}:{number} {line.strip()}")
    assert not wrong, "\n".join(wrong)
