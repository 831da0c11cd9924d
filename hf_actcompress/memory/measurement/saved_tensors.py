"""Which module keeps what: every tensor that autograd saves in one forward, and the module that was running."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ...ops import DeferredLogits
from ...records import current, hooks_outside, storage_sizes, storages_of
from .compiled import CALL, calls_exchanged

_CALLS = {getattr(torch.nn.functional, name).__code__: name for name in ("dropout", "softmax")}
# the package of our own saved-tensor hooks; their frames lie between an op and the hooks of this file
_HOOKS = hooks_outside.__module__.rpartition(".")[0]


@dataclass(frozen=True)
class SavedTensor:
    """One storage that is alive after the forward because backward needs it.

    Args:
        module: Name of the innermost module that was running when it was first saved; "" is the model.
        shape, dtype: Shape and dtype of the tensor that was saved first; other views of its storage are not counted.
        nbytes: Size of the storage.
        call: ``dropout`` or ``softmax`` if it was saved by that function of ``torch.nn.functional``.
    """

    module: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    call: str = ""

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass
class SavedTensors:
    """What one forward keeps.

    Args:
        tensors: Each storage once, in the order in which they were saved.
        tokens: Tokens that went into each layer (the modules of the outermost ModuleLists), by name.
        hidden_size: Width of the first layer's input.
        hidden_from_view: Some modules ran where their saved tensors are not seen (gradient checkpointing, offloading).
        logits: Size of ``outputs.logits`` if nothing that is kept holds it, else 0.
        logits_shape: Shape of the logits.
    """

    tensors: list[SavedTensor] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    hidden_size: int = 0
    hidden_from_view: bool = False
    logits: int = 0
    logits_shape: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class _Packed:
    """What autograd holds in place of a saved tensor; it dies with the graph node."""

    __slots__ = ("__weakref__", "call", "module", "tensor")

    def __init__(self, x: Tensor, module: str, call: str) -> None:
        # a detached alias: the tensor's graph may hold this object, and holding the graph would make a cycle
        self.tensor, self.module, self.call = x.detach() if x.requires_grad else x, module, call


class _Collector:
    """Saved-tensor hooks, and the calls of the modules, which tell where the forward is."""

    def __init__(
        self,
        model: nn.Module,
        size_of: Callable[[torch.UntypedStorage], int],
        module_of: Callable[[Tensor], str | None],
        left_out: Container[nn.Module],
    ) -> None:
        self.size_of, self.module_of = size_of, module_of
        self.stack = [""]
        self.packed: list[weakref.ref[_Packed]] = []
        self.seen = SavedTensors()
        self.layers = set(layer_names(model))
        self.names = {module: name for name, module in model.named_modules() if module not in left_out}
        self.thread = threading.get_ident()
        # for storages that are saved next: the module that keeps them
        self.keepers: dict[int, str] = {}
        self.is_idle = False

    def keeps(self, tensors: Sequence[Tensor | None], modules: Sequence[str], *, checkpointed: bool = False) -> None:
        """See `Watching`: one op runs the code of several modules below the one that is running."""
        self.keepers = {}
        hidden = self._is_hidden()
        self.seen.hidden_from_view |= hidden or checkpointed
        if hidden:
            return
        for x, module in zip(tensors, modules, strict=False):
            if x is not None:
                self.keepers[x.untyped_storage()._cdata] = self._inside(module)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """See `Watching`."""
        self.is_idle = True
        try:
            yield
        finally:
            self.is_idle = False

    @contextmanager
    def within(self, module: str) -> Iterator[None]:
        """See `Watching`."""
        self.stack.append(self._inside(module))
        try:
            yield
        finally:
            self.stack.pop()

    def _inside(self, module: str) -> str:
        return ".".join(filter(None, (self.stack[-1], module)))

    def pack(self, x: Tensor) -> _Packed:
        # the op's caller is one frame up, or above the frames of this package's hooks; its code tells whether it is
        # `functional.dropout` or `functional.softmax`, called by a module or not
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_HOOKS):
            frame = frame.f_back
        named = [self.keepers.pop(storage._cdata) for storage in storages_of(x) if storage._cdata in self.keepers]
        module = self.module_of(x) or next(iter(named), None)
        packed = _Packed(x, self.stack[-1] if module is None else module, _CALLS.get(frame.f_code, ""))
        self.packed.append(weakref.ref(packed))
        return packed

    @staticmethod
    def unpack(packed: _Packed) -> Tensor:
        return packed.tensor

    def call(self, module: nn.Module, stock: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``stock(*args, **kwargs)``, the call of a module, noted if this thread makes it."""
        if threading.get_ident() != self.thread:
            return stock(*args, **kwargs)
        self._enter(module)
        output = None
        try:
            output = stock(*args, **kwargs)
        finally:
            self._leave(args, output)
        return output

    def _enter(self, module: nn.Module) -> None:
        self.stack.append(self.names[module])
        if not self.is_idle and (not torch.is_grad_enabled() or self._is_hidden()):
            self.seen.hidden_from_view = True

    def _is_hidden(self) -> bool:
        """Whether other hooks get what is saved now."""
        top = hooks_outside()
        return top is None or top[0] != self.pack

    def _leave(self, args: Any, output: Any) -> None:
        name = self.stack.pop()
        if name in self.layers:
            # decoder layers return a tensor or a tuple that starts with one
            returned = output if isinstance(output, tuple) else (output,)
            x = next((v for v in (*args, *returned) if isinstance(v, Tensor) and v.is_floating_point()), None)
            if x is not None and x.dim() > 1:
                self.seen.hidden_size = self.seen.hidden_size or x.shape[-1]
                self.seen.tokens[name] = x.numel() // x.shape[-1]

    def finish(self, not_counted: set[int]) -> SavedTensors:
        """The saved tensors whose graph nodes are still alive, each storage once."""
        for reference in self.packed:
            packed = reference()
            if packed is None:
                continue
            x = packed.tensor
            for storage in storages_of(x):
                size = 0 if storage._cdata in not_counted else self.size_of(storage)
                if size > 0:
                    not_counted.add(storage._cdata)
                    self.seen.tensors.append(SavedTensor(packed.module, tuple(x.shape), x.dtype, size, packed.call))
        return self.seen


def layer_names(model: nn.Module) -> Iterator[str]:
    """Names of the layers: the members of the outermost ModuleLists of more than one element."""
    found: list[str] = []
    for name, module in model.named_modules():
        nested = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) > 1 and not nested:
            found.append(name)
            yield from (f"{name}.{index}" for index in range(len(module)))


@contextmanager
def _noted_calls(collector: _Collector) -> Iterator[None]:
    """Every call of these modules goes through the collector.

    No hooks are used: hooks on a module make its patched parent treat it differently, and torch's hooks for all modules
    run for every other model of the process, too.
    """
    calls = {module: module.__dict__.get(CALL) or module._call_impl for module in collector.names}
    with calls_exchanged(calls):
        for module, stock in calls.items():
            module.__dict__[CALL] = partial(collector.call, module, stock)
        yield


def storages(tensors: Iterable[Any]) -> set[int]:
    """The storages of these tensors."""
    return set(storage_sizes(tensors))


def saved_tensors(
    model: nn.Module,
    forward: Callable[[], Any],
    loss_of: Callable[[Any], Tensor],
    before: set[int],
    size_of: Callable[[torch.UntypedStorage], int] = torch.UntypedStorage.nbytes,
    module_of: Callable[[Tensor], str | None] = lambda x: None,
    left_out: Container[nn.Module] = (),
) -> SavedTensors:
    """Run `forward` once and list what backward would need. Of the output only the loss is held.

    Args:
        model: Saved tensors are attributed to its modules. Their calls are exchanged for ones that are noted, and
            restored afterwards, also if the forward fails.
        forward: Returns an output from which `loss_of` takes the loss.
        loss_of: Returns the loss of an output; raises an error if the output has none.
        before: The `storages` of what was there before (the batch), which are not counted.
        size_of: Bytes that a storage counts for.
        module_of: The module that a saved tensor belongs to; None: the one that is running.
        left_out: Modules whose calls are not noted, because a compiler traces them.

    Returns:
        Each storage once, without parameters and buffers.
    """
    collector = _Collector(model, size_of, module_of, left_out)
    with _noted_calls(collector), saved_tensors_hooks(collector.pack, collector.unpack):
        before_us, current.watcher = current.watcher, collector
        try:
            output = forward()
        finally:
            current.watcher = before_us
    loss = loss_of(output)
    logits = _size(getattr(output, "logits", None))
    # the output holds the logits, and through them graph nodes that the loss may not need
    del output
    seen = collector.finish(before | storages([*model.parameters(), *model.buffers(), loss]))
    if logits is not None and logits[0] not in _addresses(collector):
        _, seen.logits, seen.logits_shape = logits
    return seen


def _size(logits: Any) -> tuple[int, int, tuple[int, ...]] | None:
    if not isinstance(logits, Tensor) or (isinstance(logits, DeferredLogits) and not logits.chain.root().made):
        return None
    return logits.untyped_storage()._cdata, logits.nbytes, tuple(logits.shape)


def _addresses(collector: _Collector) -> set[int]:
    alive = (reference() for reference in collector.packed)
    return storages(packed.tensor for packed in alive if packed is not None)
