"""Functions of ours as single nodes of a layer's graph.

Each is an op for the tracer, which sees nothing of its inside. When the graph runs, the function is called itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("hf_actcompress", "FRAGMENT")  # type: ignore[no-untyped-call]
# what each op runs
RUNS: dict[Any, Callable[..., Any]] = {}


def node(schema: str, fake: Callable[..., Any], pointwise: bool = True) -> Callable[[Callable[..., Any]], Any]:
    """Make a function a node of that schema; `fake` gives shapes and dtypes. A pointwise one is cheap to recompute."""

    def wrap(run: Callable[..., Any]) -> Any:
        _LIBRARY.define(schema, tags=[torch.Tag.pointwise] if pointwise else [])  # type: ignore[no-untyped-call]
        name = schema.partition("(")[0]
        torch.library.register_fake(f"hf_actcompress::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.hf_actcompress, name).default
        RUNS[op] = run
        return op

    return wrap
