"""Selective recomputation (arXiv 2205.05198) for modules with code of their own between their linear layers.

Eager attention keeps the probabilities, and a state-space scan keeps every step. The tensors that such code saves are
not kept. The outputs of its linear layers are kept instead. The module's forward runs again in backward, where each
linear layer returns its kept output. A product with a weight is computed twice only if its result was modified in
place. Stock's own autograd nodes compute the backward, with the same bits.

The decision is made when the forward of the module ends. The module runs again if that keeps clearly less, if no
tensor from which it would run has been modified in place, and if a second run has given the same bits, which is tried
once for each kind of call. Otherwise the net holds what was saved, as for any other code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..private_apis import FakeTensor, at_end_of_backward, current_backward
from ..reference.dropout import StateBefore, replayed_rng
from ..reference.other_generators import OtherGenerators
from ._current import current
from .held import Again, Held, Kept, value_of
from .nested import replaced, tensors_in
from .outside import Hooks
from .registry import known_record
from .replay import Done, Replay
from .storages import storage_sizes

# tensors with fewer elements are kept
_SMALL = 256
# a second run costs time, so it must save at least this share of the bytes, beyond what it keeps itself
_WORTH = 0.125


@dataclass(frozen=True)
class Forward:
    """The forward of a module, for the first run and the second.

    Args:
        first: The stock forward.
        again: The same forward, under the autocast state of the first run. It holds no tensor.
        again_kwargs: Keyword arguments that the second run gets instead: a cache as empty as the first run found it.
        proved: For each kind of call whether a second run gives the same. New verdicts are added.
        kind: The kind of this call.
    """

    first: Callable[..., Any]
    again: Callable[..., Any]
    again_kwargs: dict[str, Any]
    proved: dict[Any, bool]
    kind: Any


def run_selectively(forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``first(*args, **kwargs)``. Keeps only the outputs of its linear layers if they are less than its code saves.

    This needs a net, which autograd asks what to hold. Without one the module just runs.
    """
    net = current.net
    tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
    if net is None or current.call is not None or not tensors or not net.is_innermost():
        return forward.first(*args, **kwargs)
    call = Call(forward, args, {**kwargs, **forward.again_kwargs}, tensors[0])
    current.call = call
    try:
        out = forward.first(*args, **kwargs)
    finally:
        current.call = None
    call.close(net)
    return out


class Call:
    """One call of such a module. It holds no tensor with a graph, because the graph holds it through saved tensors."""

    def __init__(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> None:
        self._forward: Forward | None = forward
        self._again = forward.again
        self._inputs = [_Seen(t) for t in tensors_in((args, kwargs))]
        # new containers, because the module may put its results into a dict that it was given
        self._given: Any = replaced((args, kwargs), repeat(None))
        # None for an output that was modified in place: it is recomputed
        self._linear: list[_Seen | None] = []
        # storages of the linear layers' inputs
        self._read: set[int] = set()
        self._drawn: StateBefore | None = StateBefore(x.device)
        self._saved: list[weakref.ref[Again] | None] = []
        # how many linear layers had run when the last tensor was saved
        self._needed = 0
        self._held_inputs: list[Held] = []
        self._held_linear: list[Held | None] = []
        self._values: dict[int, Tensor] = {}
        self._task = -1

    def linear(self, x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """What a linear layer returns for x. The result is noted, and so is x, which the layer itself keeps."""
        # what the linear layer itself saves does not count as saved by this call
        current.call = None
        try:
            y = compute()
        finally:
            current.call = self
        self._read |= storage_sizes([x]).keys()
        self._linear.append(_Seen(y))
        return y

    def pack(self, x: Tensor) -> Again | None:
        """What is held in place of x. Weights, small tensors and sparse ones are kept as they are."""
        if x.numel() < _SMALL or isinstance(x, Parameter) or x.layout is not torch.strided:
            self._saved.append(None)
            return None
        again = Again(self, len(self._saved), x)
        self._saved.append(weakref.ref(again))
        self._needed = len(self._linear)
        return again

    def close(self, net: Any) -> None:
        """Decide whether the module runs again, and hold what is needed in either case."""
        self._linear = [None if seen is None or seen.is_written() else seen for seen in self._linear[: self._needed]]
        saved = [again for reference in self._saved if reference and (again := reference()) is not None]
        forward, self._forward = self._forward, None
        assert forward is not None
        if saved and self._may_run_again(saved) and self._is_same(forward, saved):
            self._hold(net)
        else:
            # the module does not run again, so this call is asked for no value
            self._given, self._inputs, self._linear, self._drawn = None, [], [], None
            for again in saved:
                again.held = _held(again, net)
        for again in saved:
            again.x = None

    def _may_run_again(self, saved: Sequence[Again]) -> bool:
        if any(seen.is_written() for seen in self._inputs) or any(map(_is_written, saved)):
            return False
        known = storage_sizes(seen.x for seen in self._linear if seen is not None)
        instead = storage_sizes(seen.x for seen in self._inputs).keys() | known.keys() | self._read
        dropped = storage_sizes(a.x for a in saved if a.x is not None)
        # inputs without a gradient (masks, angles) are shared by all layers, so they are not counted
        kept = known | storage_sizes(seen.x for seen in self._inputs if seen.needed and known_record(seen.x) is None)
        less = sum(size for storage, size in dropped.items() if storage not in instead)
        more = sum(size for storage, size in kept.items() if storage not in dropped)
        if self._drawn is not None and self._drawn.has_changed():
            # a CPU's generator state is 5 kB, which is more than a tiny attention keeps
            more += self._drawn.state.nbytes
        return less - more > _WORTH * sum(kept.values())

    def _is_same(self, forward: Forward, saved: Sequence[Again]) -> bool:
        """Whether a second run saves the same bits. It is tried for the first call of its kind."""
        if isinstance(saved[0].x, FakeTensor):
            return forward.proved.get(forward.kind, True)
        if forward.kind not in forward.proved:
            forward.proved[forward.kind] = self._try(saved)
        return forward.proved[forward.kind]

    def _try(self, saved: Sequence[Again]) -> bool:
        with torch.no_grad():
            inputs = [seen.x.detach() for seen in self._inputs]
            linear = [None if seen is None else seen.x.detach() for seen in self._linear]
        try:
            with _other_generators_undisturbed():
                found = self._run(inputs, linear, saved[-1].index)
        except Exception:  # code of any library may raise an error here; the module then does not run again
            return False
        return all(again.index in found and _same_bits(again.x, found[again.index]) for again in saved)

    def _hold(self, net: Any) -> None:
        if self._drawn is not None and not self._drawn.has_changed():
            self._drawn = None
        self._held_inputs = [net.held_for(seen.x) for seen in self._inputs]
        self._held_linear = [None if seen is None else net.held_for(seen.x) for seen in self._linear]
        for seen in (*self._inputs, *self._linear):
            if seen is not None:
                seen.forget()

    def value(self, index: int, outside: Hooks | None) -> Tensor:
        """The tensor that the module's code saves at that position. The first request runs the code again."""
        if index not in self._values:
            inputs = self._inputs_again(outside)
            linear = [None if held is None else value_of(held, outside) for held in self._held_linear]
            wanted = {i for i, reference in enumerate(self._saved) if reference is not None and reference() is not None}
            found = self._run(inputs, linear, max(wanted))
            self._values = {i: found[i] for i in wanted if i in found}
            self._forget_later()
        try:
            return self._values.pop(index)
        except KeyError:
            raise RuntimeError(
                "a module was run again for its backward and did not save what it saved the first time; patch the "
                "model with CompressionConfig(selective=False)"
            ) from None

    def _inputs_again(self, outside: Hooks | None) -> list[Tensor]:
        try:
            return [value_of(held, outside) for held in self._held_inputs]
        except RuntimeError as error:
            # stock may not have saved this input, and so would raise no error itself
            raise RuntimeError(
                "a module is to run again for its backward, and one of its inputs has been written on since; patch the "
                "model with CompressionConfig(selective=False)"
            ) from error

    def _forget_later(self) -> None:
        task = current_backward()
        if task != -1 and task != self._task:
            self._task = task
            at_end_of_backward(self._values_end)

    def _values_end(self) -> None:
        self._values, self._task = {}, -1

    def _run(self, inputs: Sequence[Tensor], linear: Sequence[Tensor | None], last: int) -> dict[int, Tensor]:
        """Everything that the module's code saves, up to position `last`."""
        leaves = [_leaf(x, seen) for x, seen in zip(inputs, self._inputs, strict=True)]
        given = [None if y is None else _leaf(y, seen) for y, seen in zip(linear, self._linear, strict=True)]
        args, kwargs = replaced(self._given, iter(leaves))
        drawn: AbstractContextManager[None] = nullcontext()
        if self._drawn is not None:
            drawn = replayed_rng(self._drawn.state, self._drawn.device)
        replay = Replay(given, last)
        with torch.enable_grad(), drawn, replay.on(), suppress(Done):
            self._again(*args, **kwargs)
        replay.check()
        return replay.values


def _leaf(x: Tensor, seen: _Seen | None) -> Tensor:
    return x.detach().requires_grad_(seen is not None and seen.needed)


def _is_written(again: Again) -> bool:
    return again.x is None or again.x._version != again.version


def _held(again: Again, net: Any) -> Held:
    """What the net holds for a tensor that the module saved, if the module does not run again."""
    assert again.x is not None
    if _is_written(again):
        # such that backward raises torch's error
        return Kept((again.x,), (again.version,), None)
    held: Held = net.held_for(again.x)
    return held


@contextmanager
def _other_generators_undisturbed() -> Iterator[None]:
    """The random states of Python and numpy are restored when the block ends."""
    generators = OtherGenerators()
    try:
        yield
    finally:
        generators.restore()


class _Seen:
    """A tensor that a second run would read, with its version when the first run read it."""

    __slots__ = ("needed", "version", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.version, self.needed = x, x._version, x.requires_grad

    def is_written(self) -> bool:
        """Whether the tensor was modified in place since."""
        return bool(self.x._version != self.version)

    def forget(self) -> None:
        """Drop the tensor, because the net holds it now."""
        del self.x


def _same_bits(a: Tensor | None, b: Tensor) -> bool:
    if a is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())
