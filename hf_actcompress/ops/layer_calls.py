"""Calls in a layer's code of what no tracer sees into, or of what has effects outside of the graph.

In a trace each is noted, and its node has its number. In each call of the layer it is made a call of that layer's own
module, which the node runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from ..private_apis import FakeTensor

# the attribute of a module's copy, in a trace, that says where in the layer the module is
PATH = "actcompress_path"
_NOTHING = nullcontext()


class LayerCall(Protocol):
    """One such call.

    Attributes:
        path: The module that is called, by its name in the layer.
    """

    @property
    def path(self) -> str: ...

    def of(self, module: nn.Module, given: Mapping[str, Sequence[Any]], runs_again: bool) -> Any:
        """The call in one call of a layer, whose module of that path is `module`: what the node runs."""
        ...

    def why_not_again(self, again: bool) -> str:
        """Why no layer with it can be checkpointed; empty if one can. `again`: whether backward calls it again."""
        ...


class _State(threading.local):
    """Attributes:
    made: The calls that the trace in progress has found; None outside of a trace.
    given: What the traced call is given, by kind.
    running: What the graph that runs calls.
    likes: Of each call in the trace, its tensors that want a gradient.
    """

    made: list[Any] | None = None
    given: Mapping[str, Sequence[Any]] = {}
    running: Sequence[Any] = ()
    likes: dict[int, list[Tensor]] = {}


state = _State()


@contextmanager
def traced_calls(given: Mapping[str, Sequence[Any]]) -> Iterator[list[LayerCall]]:
    """While a layer is traced: the calls that it makes. `given` is what the layer's call is given, by kind."""
    before = state.made, state.given, state.likes
    state.made, state.given, state.likes = [], given, {}
    try:
        yield state.made
    finally:
        state.made, state.given, state.likes = before


def running(calls: Sequence[Any]) -> AbstractContextManager[None]:
    """While the graph of a layer runs: what its nodes call."""
    return _running(calls) if calls else _NOTHING


@contextmanager
def _running(calls: Sequence[Any]) -> Iterator[None]:
    before, state.running = state.running, calls
    try:
        yield
    finally:
        state.running = before


def calls_so_far() -> list[LayerCall]:
    """The calls that the trace in progress has found."""
    assert state.made is not None, "a layer is traced"
    return state.made


def running_call(number: int, x: Tensor) -> Any:
    """A call of the graph that runs, x being what it is given; None if its code is only tried on tensors without data,
    and without a layer."""
    return None if isinstance(x, FakeTensor) and not state.running else state.running[number]
