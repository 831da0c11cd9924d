"""The record of one call of a kernel's function: the ops of torch and the launches that it made, in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import launch

_ALLOCATES = ("aten::empty", "aten::new_empty")
# ops whose results have other sizes, or other numbers, in each call
_DIFFERS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded)
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# a function with more steps computes much beside its launches
_MOST_STEPS = 32


class NoRecordError(Exception):
    """A call that no record describes."""


class _Op(NamedTuple):
    """An op of torch. `places`: position and number of each tensor among the arguments; `results`: their numbers;
    `writes`: whether it writes on an argument."""

    call: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    places: list[tuple[int, int]]
    results: list[int]
    writes: bool = False


class _Launch(NamedTuple):
    """A launch. `places`: position, number and dtype of each tensor among the values."""

    code: launch.Code
    grid: tuple[int, ...]
    values: list[Any]
    places: list[tuple[int, int, torch.dtype]]


class Record:
    """What a call does. Tensors have numbers: those that are given, then those that are made.

    Args:
        steps: Each with the numbers of the tensors that no later step reads.
        results: The numbers of the results; None where the function returns None.
        alone: Whether it returns one tensor and no tuple.
        made: How many tensors are made.
    """

    def __init__(
        self, steps: list[tuple[_Op | _Launch, list[int]]], results: list[int | None], alone: bool, made: int
    ) -> None:
        self._steps, self._results, self._alone, self._empty = steps, results, alone, [None] * made

    def run(self, given: Sequence[Tensor]) -> Any:
        """Do the same with other tensors of the same form."""
        tensors: list[Any] = [*given, *self._empty]
        stream = launch.stream_of(given[0].device)
        for step, dead in self._steps:
            if isinstance(step, _Launch):
                values = step.values.copy()
                if stream is not None:
                    for position, number, _ in step.places:
                        values[position] = tensors[number].data_ptr()
                else:
                    for position, number, dtype in step.places:
                        values[position] = tensors[number].view(dtype)
                step.code.launch(step.grid, stream, values)
            else:
                args = step.args
                if step.places:
                    args = args.copy()
                    for position, number in step.places:
                        args[position] = tensors[number]
                found = step.call(*args, **step.kwargs)
                if len(step.results) == 1:
                    tensors[step.results[0]] = found
                else:
                    for number, x in zip(step.results, found, strict=True):
                        tensors[number] = x
            for number in dead:
                tensors[number] = None
        if self._alone:
            return tensors[self._results[0]]  # type: ignore[index]
        return tuple([None if number is None else tensors[number] for number in self._results])


def record_of(function: Callable[..., Any], args: Sequence[Any], given: Sequence[Tensor]) -> tuple[Any, Record | None]:
    """What the function returns, and the record of the call if it has one."""
    watch = _Watch()
    with launch.noted(watch.seen), watch:
        found = function(*args)
    results = list(found) if isinstance(found, tuple) else [found]
    try:
        return found, _Writer(given).record(watch, results, not isinstance(found, tuple))
    except NoRecordError:
        return found, None


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes ops, and the launches between them.

    Attributes:
        seen: For each op the op, its arguments and its result; for each launch what `launch.noted` notes.
        plain: Whether the call may be repeated with other values.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []
        self.plain = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        results = found if isinstance(found, (tuple, list)) else [found]
        if not all(isinstance(x, Tensor) for x in results):
            # a dtype, or something that was read from a tensor
            self.plain = self.plain and not any(isinstance(x, Tensor) for x in args)
        elif any(tag in func.tags for tag in _DIFFERS):
            self.plain = False
        else:
            self.seen.append((func, args, kwargs or {}, results))
        return found


def _is_plain(x: Any) -> bool:
    """Whether an argument of an op is the same in each call. A generator is that of the model that runs."""
    return all(map(_is_plain, x)) if isinstance(x, (list, tuple)) else isinstance(x, _PLAIN)


class _Writer:
    """Writes a record: finds each tensor that a step takes among those that are given or made before."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._numbers = {id(x): number for number, x in enumerate(given)}
        # the first tensor at each address, which a launch may be given in the place of a view of it
        self._first = {x.data_ptr(): number for number, x in enumerate(given)}
        self._given = self._count = len(given)

    def record(self, watch: _Watch, results: Sequence[Any], alone: bool) -> Record:
        """The record of what was seen. Raises NoRecordError."""
        if not watch.plain or None in watch.seen or len(watch.seen) > _MOST_STEPS:
            raise NoRecordError
        found = [self._launch(*seen) if isinstance(seen[0], launch.Code) else self._op(*seen) for seen in watch.seen]
        steps: list[_Op | _Launch] = [step for step in found if step is not None]
        numbers = [None if x is None else self._number(x) for x in results]
        return Record(_with_ends(steps, numbers), numbers, alone, self._count - self._given)

    def _number(self, x: Any) -> int:
        number = self._numbers.get(id(x)) if isinstance(x, Tensor) else None
        if number is None:
            raise NoRecordError
        return number

    def _launch(self, code: launch.Code, grid: tuple[int, ...], args: Sequence[Any]) -> _Launch:
        values, places = [*args, *code.constants], list[tuple[int, int, torch.dtype]]()
        for position, x in enumerate(args):
            if isinstance(x, Tensor):
                number = self._number(x)
                # tensors without elements all have the address 0
                places.append((position, self._first[x.data_ptr()] if x.numel() else number, x.dtype))
                values[position] = None
        return _Launch(code, grid, values, places)

    def _op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], found: Sequence[Tensor]) -> _Op | None:
        if not all(isinstance(x, Tensor) or _is_plain(x) for x in args) or not all(map(_is_plain, kwargs.values())):
            raise NoRecordError
        if func is torch.ops.aten.detach.default and self._number(args[0]) >= self._given:
            # of a new tensor, it is another name
            self._numbers[id(found[0])] = self._number(args[0])
            return None
        places = [(position, self._number(x)) for position, x in enumerate(args) if isinstance(x, Tensor)]
        constant = [None if isinstance(x, Tensor) else x for x in args]
        results = []
        for x in found:
            if id(x) not in self._numbers:
                self._numbers[id(x)] = self._count
                self._first.setdefault(x.data_ptr(), self._count)
                self._count += 1
            results.append(self._numbers[id(x)])
        if func._schema.name.startswith(_ALLOCATES):
            (x,) = found
            make = partial(torch.empty_strided, tuple(x.shape), x.stride(), dtype=x.dtype, device=x.device)
            return _Op(make, [], {}, [], results)
        return _Op(func, constant, kwargs, places, results, func._schema.is_mutable)


def _with_ends(steps: Sequence[_Op | _Launch], results: Sequence[int | None]) -> list[tuple[_Op | _Launch, list[int]]]:
    """The steps that are needed, each with the numbers of the tensors that it or nobody reads last."""
    wanted = {number for number in results if number is not None}
    found: list[tuple[_Op | _Launch, list[int]]] = []
    for step in reversed(steps):
        read = {place[1] for place in step.places}
        if isinstance(step, _Op):
            made = set(step.results)
            if not made & wanted and not step.writes:
                continue
        else:
            made = set()
        found.append((step, sorted((read | made) - wanted)))
        wanted |= read
    return found[::-1]
