"""Puts our partition of joint graphs into Inductor's options before the first graph of a patched model is divided.

Inductor calls `torch._inductor.config.custom_partitioner_fn` to divide the joint graph of a forward and its backward.
Ours divides the graphs of patched models, which have marks, and hands all others to the function that was set before.
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
    """Put our partition around the function in Inductor's options, unless it is there already.

    Every trace of a mark calls this, because the options can differ from trace to trace: the caller of `torch.compile`
    may pass some, and somebody may have set another function since the last trace.
    """
    before = inductor.custom_partitioner_fn
    if not isinstance(before, Partitioner):
        inductor.custom_partitioner_fn = Partitioner(before)


class Partitioner(CustomPartitionerFn):
    """Divides graphs with marks by the marks, and any other graph as `inner` does, or as torch does without one."""

    def __init__(self, inner: CustomPartitionerFn | None) -> None:
        self.inner = inner

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        from .partition import partition

        return partition(gm, joint_inputs, inner=self.inner, **kwargs)

    def uuid(self) -> Any:
        """A key for our code and that of `inner`; None if `inner` has no key, which switches torch's caches off."""
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
