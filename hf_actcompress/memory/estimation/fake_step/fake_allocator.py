"""A stand-in for the allocator: which storages a step would hold, without any of their data.

torch's own trackers (`torch.distributed._tools`) tell parameters, gradients and other storages apart by hooks on the
modules. They know neither what backward keeps nor ops whose results depend on data, so this class counts itself.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ....private_apis import ENGINE_CALLS, FakeTensor, unset_fake_temporarily, without_torch_function_modes
from ....records import storages_of
from .answers import ASKS, TELLS, Answers
from .op_results import OpCalls, OpResults
from .workspaces import CPU_WORKSPACES, Workspace

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default

# ops that make tensors with known values from nothing, and the most elements for which values are computed
_LITERALS = (aten.lift_fresh.default, aten.arange.default, aten.arange.start, aten.arange.start_step)
_MOST_KNOWN = 2**16


@dataclass(frozen=True, slots=True)
class _Op:
    """What is known about an op, looked up by its `id`: torch computes an op's hash in Python, in each call.

    Args:
        func: The op, which keeps its `id` its own.
        draws: Whether it draws random numbers. A higher-order op has no `tags`; to read them takes as long as many ops.
        asks, tells: Whether it is one of `ASKS` or `TELLS`.
    """

    func: Any
    draws: bool
    asks: bool
    tells: bool


_OPS: dict[int, _Op] = {}


def _op(func: Any) -> _Op:
    draws = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
    return _OPS.setdefault(id(func), _Op(func, draws, func in ASKS, func in TELLS))


def all_known(arguments: Any, known: Container[Any]) -> bool:
    """Whether there are tensors among the arguments, and all of them are known."""
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor)]
    return bool(tensors) and all(x in known for x in tensors)


class FakeAllocator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the fake storages that are made while it is on. Enter it inside the FakeTensorMode.

    Args:
        block: Sizes are rounded up to a multiple of this many bytes (512 in CUDA's caching allocator).
        workspaces: Op -> bytes that its kernel takes while it runs.
        in_fp32: Op -> the results that the device has in fp32, whatever a CPU has.
        results: Op and arguments -> result, as far as known; new ones are added.

    Attributes:
        live_bytes: Bytes of the storages that are alive now.
        peak_bytes: The highest `live_bytes` so far.
        draws: How often random numbers have been drawn.
        timeline: `live_bytes` after each allocation.
        changes: The size of each storage without rounding: positive when it is made, negative when it is freed.
        marks: For each entry of the timeline, how many changes there were before it.
        owners: For each change, the number of the storage that changed; no other storage has this number.
        gradients: The numbers of the storages that were added to a weight's gradient.
        is_muted: Whether `results_only` is on.
    """

    # compiled graphs contain such ops, for instance around an op whose generator state is kept
    supports_higher_order_operators = True

    def __init__(
        self,
        block: int = 1,
        workspaces: Mapping[Any, Workspace] = CPU_WORKSPACES,
        in_fp32: Mapping[Any, tuple[int, ...]] = MappingProxyType({}),
        results: OpResults | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.block, self.workspaces, self.in_fp32 = block, workspaces, in_fp32
        self._has_rules = {id(func) for func in (*workspaces, *in_fp32)}
        self._calls = OpCalls(OpResults() if results is None else results)
        self.live_bytes = self.peak_bytes = self.draws = 0
        self.timeline: list[int] = []
        self.changes: list[int] = []
        self.marks: list[int] = []
        self.owners: list[int] = []
        self.gradients: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._of_weights: frozenset[int] = frozenset()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._answers = Answers()
        # small tensors whose values are known
        self._known = WeakIdKeyDictionary()
        self.is_muted = self._elsewhere = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would wrap each call below to hide it from a compiler, which is never active here
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # this is more than half of all calls: autograd asks it for every tensor that it touches
            return args[0].fake_device
        kwargs = kwargs or {}
        if self._known and (func in _LITERALS or all_known((args, kwargs), self._known)):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
            tensors = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            if all(x.numel() <= _MOST_KNOWN and not x.is_floating_point() for x in tensors):
                self.know(tensors)
                return result
        op = _OPS.get(id(func)) or _op(func)
        self.draws += op.draws
        answer = self._answers.to(func, args) if op.asks else None
        if answer is not None:
            result = answer()
            if isinstance(result, FakeTensor):
                self.count(result)
            return result
        if func is aten.add.Tensor and sys._getframe(1).f_code in ENGINE_CALLS:
            return self._accumulated(func, args, kwargs)
        if func is aten.add_.Tensor and any(x._cdata in self._of_weights for x in storages_of(args[0])):
            self.gradients.update(self._numbers[storage._cdata] for storage in storages_of(args[1]))
        result = self._calls(func, args, kwargs)
        if op.tells:
            self._answers.learn(func, args, result)
        has_rules = id(func) in self._has_rules
        for position in self.in_fp32.get(func, ()) if has_rules else ():
            self.count(result[position], 4 * result[position].numel())
        with without_torch_function_modes():
            for x in (result,) if type(result) is FakeTensor else tree_leaves(result):
                # the meta device has no memory: logits that are not computed are on it
                if isinstance(x, FakeTensor) and x.fake_device.type != "meta":
                    self.count(x)
        workspace = self.workspaces.get(func) if has_rules else None
        if workspace is not None and not self._elsewhere:
            self.works_in(*workspace(args, kwargs))
        return result

    def works_in(self, *sizes: int) -> None:
        """Note the peak at which pieces of these sizes in bytes are alive for a moment beside what is alive now."""
        numbers = range(len(self.changes), len(self.changes) + len(sizes))
        self.owners += [*numbers, *numbers]
        self.changes.extend(sizes)
        self._note_peak(self.live_bytes + sum(map(self.rounded, sizes)))
        self.changes.extend(-size for size in sizes)

    def rounded(self, nbytes: int) -> int:
        """The size of the block that the allocator gives for so many bytes."""
        return -(-nbytes // self.block) * self.block

    def size_of(self, storage: torch.UntypedStorage) -> int:
        """The bytes that are counted for a storage."""
        return self.rounded(self._sizes.get(storage._cdata, 0))

    def count(self, x: Tensor, nbytes: int | None = None) -> None:
        """Add x's storage if it is not counted yet, with its own size or with `nbytes`."""
        for storage in storages_of(x):
            if storage._cdata not in self._sizes:
                self._count(storage, storage.nbytes() if nbytes is None else nbytes)

    def _count(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        key = storage._cdata
        size = 0 if self._elsewhere else nbytes
        self._sizes[key] = size
        self._references[key] = weakref.ref(storage, lambda _: self._drop(key))
        self.live_bytes += self.rounded(size)
        self._numbers[key] = len(self.changes)
        self._changed(key, size)
        self._note_peak(self.live_bytes)

    def _changed(self, key: int, change: int) -> None:
        self.changes.append(change)
        self.owners.append(self._numbers[key])

    def forget(self) -> None:
        """Stop counting what is alive now, and start from zero."""
        self._sizes = dict.fromkeys(self._sizes, 0)
        self.live_bytes = self.peak_bytes = 0
        self.timeline, self.changes, self.marks, self.owners, self.gradients = [], [], [], [], set()

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Note that a storage which is counted has another size now."""
        key = storage._cdata
        if self._sizes.get(key, nbytes) != nbytes:
            change = nbytes - self._sizes[key]
            self.live_bytes += self.rounded(nbytes) - self.rounded(self._sizes[key])
            self._sizes[key] = nbytes
            self._changed(key, change)
            if change > 0:
                self._note_peak(self.live_bytes)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors: they existed before, or are not on the device."""
        for x in tensors:
            self.count(x, 0)

    def add_up(self, gradients: Iterable[Tensor]) -> None:
        """Leave these gradients of weights out, and note what is added to them."""
        held = list(gradients)
        self.leave_out(held)
        self._of_weights = frozenset(storage._cdata for x in held for storage in storages_of(x))

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Note that these tensors have real values, uncounted. Results of ops on such tensors alone have them, too."""
        self._known.update((x, None) for x in tensors)

    @contextmanager
    def results_only(self, note: bool = True) -> Iterator[None]:
        """A call that becomes one kernel: its temporary tensors are not counted, its results are.

        With `note=False` the results enter the timeline at the next allocation only.
        """
        muted, self.is_muted = self.is_muted, True
        try:
            yield
        finally:
            self.is_muted = muted
            if note:
                self._note_peak(self.live_bytes)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside is not counted: it is in host memory, or stands for something that was counted."""
        self._elsewhere = True
        try:
            yield
        finally:
            self._elsewhere = False

    def _accumulated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The sum of two gradients of one tensor, counted as on a real device.

        There the engine writes the sum into the first gradient if nobody else holds that one; on fake tensors it never
        does. So the sum and the first gradient are not counted as alive at once. If somebody holds the first gradient,
        it stays counted, and the next allocation notes that.
        """
        with self.results_only(note=False):
            result = self._calls(func, args, kwargs)
            self.count(result)
        return result

    def _note_peak(self, nbytes: int) -> None:
        if not self.is_muted:
            self.timeline.append(nbytes)
            self.marks.append(len(self.changes))
            self.peak_bytes = max(self.peak_bytes, nbytes)

    def _drop(self, key: int) -> None:
        self._references.pop(key, None)
        size = self._sizes.pop(key, 0)
        self.live_bytes -= self.rounded(size)
        self._changed(key, -size)
        del self._numbers[key]
