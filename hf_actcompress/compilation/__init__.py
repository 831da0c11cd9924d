"""torch.compile of patched models: the graph keeps what the eager ops keep.

While a patched module is traced it runs its stock forward, and marks what backward reads (`marks.py`). When the
compiler divides the graph of forward and backward, `partition.py` takes the marks out, tells torch's partitioner what
to keep and what to compute again (`policy.py`), and packs what crosses through the codecs (`packing.py`). For Inductor
it also takes the logits in pieces (`logits.py`) and puts backward into an order (`ordering.py`). `install.py` brings
that into Inductor's options; `_backend.py` is a backend of its own, without code generation; `breaks.py` warns of
broken graphs. For estimates and reports `observation.py` runs Inductor's graphs op by op, and `buffers.py` says which
of their results the generated code would not write to memory.
"""

from __future__ import annotations

from . import breaks, install, marks
from ._backend import backend, register
from .marks import PLAIN, any_length, keep, offer, recompute

marks.ON_TRACE.extend((install.install, breaks.note_trace))

__all__ = ["PLAIN", "any_length", "backend", "keep", "offer", "recompute", "register"]
