"""What the numeric probes have in common: they ask what a module computes, and leave no trace in it.

A probe compares a module's own forward with ours, bit by bit. It has to try every dtype and every magnitude that a
training meets, because modules that agree in fp32 near zero may differ elsewhere: a clamp acts on large values alone,
and the place of a cast is seen only where input and weight have different dtypes.

A module that raises on an input that it was not written for, whatever it raises, is a module that is left alone. So
every probe that runs a module's code catches `Exception`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig

from ..modules.base import HOOKS, own_attributes
from ..ops.snapshot import with_attributes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# magnitude of the rows of `probe_rows`; some squares overflow in fp16, which shows where a module computes in fp32
MAGNITUDES = (0.0, 1e-3, 1e-2, 0.1, 1.0, 3.0, 10.0, 100.0, 1000.0)

_Answer = TypeVar("_Answer")
# the answers of probes, by the probe and what it was asked about
Answers = dict[Hashable, Any]
_answers: ContextVar[Answers | None] = ContextVar("answers of probes", default=None)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@contextmanager
def answers_kept(answers: Answers | None = None) -> Iterator[None]:
    """While the block runs, a probe runs once for modules that are alike, because a model has hundreds.

    Args:
        answers: Earlier answers, to which new ones are added. None: the answers that are in use, or an empty dict.
    """
    if answers is None:
        answers = _answers.get()
    token = _answers.set({} if answers is None else answers)
    try:
        yield
    finally:
        _answers.reset(token)


def asked_once(module: nn.Module, probe: Callable[..., _Answer], *about: Hashable) -> _Answer:
    """``probe(module, *about)``, or what it has answered for a module of the same class, attributes and weights' sizes.

    The probe may read nothing else of the module and its children; it reads no weight's values.
    """
    answers, key = _answers.get(), _likeness(module)
    if answers is None or key is None:
        return probe(module, *about)
    key = probe, about, key
    if key not in answers:
        answers[key] = probe(module, *about)
    found: _Answer = answers[key]
    return found


def _likeness(module: nn.Module) -> Hashable | None:
    """A key that modules that are alike share; None for one with buffers or values that are not plain, also below."""
    own = tuple((name, *_value(value)) for name, value in own_attributes(module).items())
    if module._buffers or not all(issubclass(kind, (*_PLAIN, _Itself)) for _, kind, _ in own):
        return None
    children = tuple((name, None if child is None else _likeness(child)) for name, child in module._modules.items())
    if any(child is None for _, child in children):
        return None
    weights = (
        (name, p if p is None else (p.shape, getattr(p, "ds_numel", None), p.dtype, p.device))
        for name, p in module._parameters.items()
    )
    return type(module), module.training, own, tuple(weights), children


class _Itself:
    """A config as a part of a key: equal to itself alone, and alive as long as the key."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._config is self._config

    def __hash__(self) -> int:
        return id(self._config)


def _value(value: Any) -> tuple[type, Any]:
    return (_Itself, _Itself(value)) if isinstance(value, PretrainedConfig) else (type(value), value)


class StandIn(nn.Module):
    """Stands in for a linear layer, so that no weight is read: a pointwise affine map, another one for each index.

    With `halves` it returns two halves, as a fused projection does. `returned` is its last output.
    """

    def __init__(self, index: int, halves: bool = False) -> None:
        super().__init__()
        self.index, self.halves, self.returned = index, halves, torch.empty(0)
        self.weight = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1.25 + 0.5 * self.index) + 0.125 * self.index
        self.returned = torch.cat([y, 0.75 - y], dim=-1) if self.halves else y
        return self.returned


def shallow_copy(module: nn.Module) -> Any:
    """The same as `copy.copy`, also of a module that FSDP2 has sharded: its class would make a new module."""
    return with_attributes(type(module), vars(module))


def bare_copy(module: nn.Module) -> Any:
    """A shallow copy with the forward of its class, without hooks, and with a dictionary of children of its own."""
    probe = shallow_copy(module)
    probe.__dict__.update({hooks: {} for hooks in HOOKS})
    probe.__dict__.pop("forward", None)
    probe._modules = dict(module._modules)
    return probe


def probe_rows(width: int) -> Tensor:
    """Random rows [1, M, width] in fp32 on the CPU, one for each magnitude."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(MAGNITUDES), width, generator=generator) + 0.1
    return (rows * torch.tensor(MAGNITUDES)[:, None])[None]


def same_bits(a: object, b: object) -> bool:
    """Whether two results are tensors of one dtype, shape and value; NaN equals NaN."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def takes_one_tensor(module: nn.Module) -> bool:
    """Whether the forward has one parameter besides self. Another one (a gate, a residual) changes what it computes."""
    return len(inspect.signature(type(module).forward).parameters) == 2


class NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before a random number is drawn, in this thread."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RuntimeError(f"a probed module draws random numbers ({func})")
        return func(*args, **(kwargs or {}))


@contextmanager
def undisturbed() -> Iterator[None]:
    """No gradient, no autocast, and no random number: a module that draws one computes no function.

    Restoring the generator afterwards instead would undo the draws of another thread.
    """
    with torch.no_grad(), NoDraws(), torch.autocast("cpu", enabled=False):  # type: ignore[no-untyped-call]
        if torch.cuda.is_available():
            with torch.autocast("cuda", enabled=False):
                yield
            return
        yield
