"""The rules of a device for which an estimate is made, and which need not be present; None while real tensors are used.

An estimate runs a step on tensors without data and counts what another device would allocate. Functions that behave
differently on that device call `device_rules()`. The answer is a context variable: the estimating thread sees it, and a
training in another thread does not. The backward of an estimate runs in the thread that called it, because autograd has
its own threads only for devices other than the CPU, and the estimate's tensors are all on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from typing import Any, Protocol

from torch import Tensor

from ..compiling import is_compiling


class DeviceRules(Protocol):
    """The rules of one estimated device."""

    @property
    def on_cpu(self) -> bool:
        """Whether it is a CPU."""
        ...

    def function(self, name: str) -> Callable[..., Any]:
        """The function of `reference/` as that device runs it."""
        ...

    def turns(self, starts: range) -> Sequence[int]:
        """The turns of a loop over chunks that have to be run; the others would not hold more bytes than these."""
        ...

    def parts(self, every: list[slice]) -> Iterator[slice]:
        """The same for slices whose results are joined: together the returned slices have the size of all."""
        ...

    def rng_state(self) -> Tensor:
        """The state of the default generator, counted if that device keeps it."""
        ...

    @property
    def draws(self) -> int:
        """How often random numbers were drawn."""
        ...

    def to_host(self, x: Tensor) -> Tensor:
        """A copy of x in host memory."""
        ...

    def to_device(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The tensors that `to_host` returned, back on the device."""
        ...


# how many estimates are made now, in all threads. While there is none, no step of a training reads a context variable
_estimates = 0
_lock = Lock()
_rules: ContextVar[DeviceRules | None] = ContextVar("hf_actcompress_device_rules", default=None)


def device_rules() -> DeviceRules | None:
    """The rules that hold in this thread; None: the real device of each tensor counts."""
    # a compiler cannot trace a context variable, and it never traces an estimate
    return None if not _estimates or is_compiling() else _rules.get()


@contextmanager
def under_rules(rules: DeviceRules | None) -> Iterator[None]:
    """While the block runs, `device_rules()` returns `rules` in this thread; None means that real tensors are used."""
    global _estimates
    token = _rules.set(rules)
    with _lock:
        _estimates += 1
    try:
        yield
    finally:
        _rules.reset(token)
        with _lock:
            _estimates -= 1


def on_cpu(x: Tensor) -> bool:
    """Whether x is on a CPU, also an estimated one: the host can read its values without waiting for a device."""
    rules = device_rules()
    return x.device.type == "cpu" if rules is None else rules.on_cpu


def takes_constants(x: Tensor) -> bool:
    """Whether x can be combined with constant CPU tensors. A tensor without data needs others without data."""
    return type(x) is Tensor and x.is_cpu and not is_compiling() and _rules.get() is None
