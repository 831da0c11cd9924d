"""Our partition of joint graphs in Inductor's options: there before the first graph of a patched model is partitioned.

Inductor asks `torch._inductor.config.custom_partitioner_fn` to divide the graph of a forward and its backward. Ours
hands graphs without marks, those of stock models, to whatever was there before, and divides the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule


def install() -> None:
    """Put our partition around the one in Inductor's options, if it is not there.

    Every trace of a mark calls this. The options that hold then are those of the `torch.compile` that traces, also if
    its caller passed them, and also if somebody has put another partition there since the last trace.
    """
    before = inductor.custom_partitioner_fn
    if not isinstance(before, Partitioner):
        inductor.custom_partitioner_fn = Partitioner(before)


class Partitioner(CustomPartitionerFn):
    """Divides graphs with marks by them; any other graph as `inner`, or as torch does without one."""

    def __init__(self, inner: CustomPartitionerFn | None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        from .partition import partition

        return partition(gm, joint_inputs, inner=self.inner, **kwargs)

    def uuid(self) -> Any:
        """Of the code that divides and packs; None, which switches torch's caches off, if the inner one has none."""
        if self.inner is None:
            return _hash("")
        inner = self.inner.uuid()
        return None if inner is None else _hash(repr(inner))


@cache
def _hash(inner: str) -> bytes:
    package = Path(__file__).parent.parent
    files = sorted(
        str(path) for part in ("compilation", "codecs", "reference") for path in (package / part).rglob("*.py")
    )
    return get_hash_for_files(tuple(files), inner)
