"""Warns, once per reason, if the graph of a patched model is broken."""

from __future__ import annotations

import logging
from functools import cache
from threading import local
from typing import Any

from ..private_apis import after_compiling, graph_breaks, traced_frame

_log = logging.getLogger(__name__)


class _Trace(local):
    """The frame that this thread traces, and how many graph breaks there were before the frame's first mark."""

    frame: Any = None
    before = 0


_trace = _Trace()


def note_trace() -> None:
    """Called when a patched model or a mark is traced. Breaks before that, and those of other models, do not count."""
    after_compiling(warn_of_break)
    frame = traced_frame()
    if frame != _trace.frame:
        _trace.frame, _trace.before = frame, len(graph_breaks())


def warn_of_break(_: object) -> None:
    """Called when Dynamo is done with a frame, also if it skips it. It warns if there was a break in it."""
    if _trace.frame is not None and _trace.frame == traced_frame():
        # after a reset of Dynamo another frame has this number
        _trace.frame, reasons = None, graph_breaks()
        if len(reasons) > _trace.before:
            _say_broken(reasons[-1].splitlines()[0])


@cache
def _say_broken(reason: str) -> None:
    _log.warning(
        "torch.compile has broken the graph of a model (%s). What it cannot trace runs and saves as in eager mode. "
        "What crosses from one part of a patched model to the next is kept as it is; "
        'TORCH_LOGS="graph_breaks" shows where the breaks are, fullgraph=True makes them errors',
        reason,
    )
