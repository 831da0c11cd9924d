"""Puts our partition of joint graphs into Inductor's options before the first graph of a patched model is divided.

Inductor calls `torch._inductor.config.custom_partitioner_fn` to divide the joint graph of a forward and its backward.
Ours divides the graphs of patched models, which have marks, and hands all others to the function that was set before.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch.fx import GraphModule

from ..codecs.table import CODECS


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
        """A key for our code, that of `inner` and all codecs; a new one each time if `inner` or a codec has none.

        A mark has a codec's name alone, and others may register another codec of that name in the next process. A key
        of None would not switch torch's caches off: all partitions without a key would share their graphs.
        """
        inner, codecs = "" if self.inner is None else self.inner.uuid(), codecs_key()
        if inner is None or codecs is None:
            return os.urandom(32)
        return _hash(repr((self.inner is None, inner, codecs)))


def codecs_key() -> str | None:
    """All codecs' parameters, and the text of the files of those that are not ours; None if one has no file."""
    rows = sorted((name, repr(codec)) for name, codec in CODECS.items())
    # the classes of each codec and of the codecs that it holds, with their bases
    parts = (part for codec in CODECS.values() for part in (codec, *getattr(codec, "__dict__", {}).values()))
    kinds = {kind for part in parts if hasattr(part, "pack") for kind in type(part).__mro__}
    known = {*sys.stdlib_module_names, "hf_actcompress"}
    try:
        files = {inspect.getfile(kind) for kind in kinds if kind.__module__.partition(".")[0] not in known}
        return repr((rows, [Path(file).read_text() for file in sorted(files)]))
    except (OSError, TypeError):
        return None


@cache
def _hash(others: str) -> bytes:
    package = Path(__file__).parent.parent
    files = sorted(
        str(path)
        for part in ("compilation", "codecs", "methods", "private_apis", "reference")
        for path in (package / part).rglob("*.py")
    )
    return get_hash_for_files(tuple(files), others)
