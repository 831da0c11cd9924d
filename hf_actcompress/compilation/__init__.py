"""torch.compile of patched models: the graph keeps what the eager ops keep.

While a patched module is traced it runs its stock forward, and marks the tensors that backward reads (`marks.py`). When
the compiler divides the joint graph into forward and backward, `partition.py` removes the marks, tells torch's
partitioner which nodes to keep and which to recompute (`policy.py`), and lets codecs pack the saved tensors
(`packing.py`; `calls.py` puts their graphs in). For Inductor it also computes the logits in pieces (`logits.py`) and
orders the backward (`ordering.py`). `install.py` puts this into Inductor's options. `_backend.py` is our own backend,
which generates no code. `breaks.py` warns of broken graphs. For estimates and reports `observation.py` runs Inductor's
graphs op by op, `attribution.py` says to which module a value belongs, and `buffers.py` which results the generated
code would not write to memory.
"""

from __future__ import annotations

from ..compiling import is_traced, is_traced_plan, traced_plan
from . import breaks, install, marks
from ._backend import backend, register
from .marks import (
    PLAIN,
    any_length,
    keep,
    note_trace,
    offer,
    part_of,
    recompute,
)

marks.ON_TRACE.extend((install.install, breaks.note_trace))

__all__ = [
    "PLAIN",
    "any_length",
    "backend",
    "is_traced",
    "is_traced_plan",
    "keep",
    "note_trace",
    "offer",
    "part_of",
    "recompute",
    "register",
    "traced_plan",
]
