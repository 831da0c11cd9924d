"""Warns, once per reason, if the graph of a patched model is broken."""

from __future__ import annotations

import logging
from functools import cache
from threading import local
from typing import Any

from ..private_apis import graph_breaks, traced_frame

_log = logging.getLogger(__name__)


class _Trace(local):
    """The frame that this thread traces, and how many graph breaks there were before the frame's first mark."""

    frame: Any = None
    before = 0


_trace = _Trace()


def note_trace() -> None:
    """Called when a mark is traced. Breaks of other models, and before the first patched module, do not count."""
    frame = traced_frame()
    if frame != _trace.frame:
        _trace.frame, _trace.before = frame, len(graph_breaks())


def warn_of_break() -> None:
    """Called when a traced graph is divided. It warns if the graph ends because of a break."""
    reasons = graph_breaks()
    if _trace.frame == traced_frame() and len(reasons) > _trace.before:
        _say_broken(reasons[-1].splitlines()[0])


@cache
def _say_broken(reason: str) -> None:
    _log.warning(
        "torch.compile has broken the graph of a model (%s). What crosses from one part of a patched model to the next "
        'is kept as it is; TORCH_LOGS="graph_breaks" shows where the breaks are, fullgraph=True makes them errors',
        reason,
    )
