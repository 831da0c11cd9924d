"""Which record belongs to a live tensor.

A tensor is found by its data (storage, offset, element count, dtype, version counter), so that a view of the same data
has the same record, and a tensor that was written in place is a new one. A tensor whose sources were modified since
can no longer be rebuilt, so its consumers keep it. (Writes through `.data` change no version counter and are not seen
here.) An entry ends with its tensor object, with the forward of the patched model (`frame`), and as soon as the
innermost saved-tensor hooks change: this happens where a checkpointed region begins or ends, and a record must not
cross that border.

Each thread has its own registry, which describes the forward in progress and nothing else. A traced forward has no
registry: there modules run stock's code, except for ops that store a tensor which they could derive (`encoded`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from ..codecs import IDENTITY, Codec
from ..compiling import is_compiling
from ._current import current
from .entry import Entry
from .module_hooks import region_begins
from .outside import hooks_outside
from .padding import is_dropped, keep, keep_later, padding_in, rows_left_out
from .record import Derived, Recipe, Record, Stored
from .views import pixels_first, tokens_first

# a part of at most one in so many elements is kept as a copy
_FEW = 16
_Key = tuple[int, int, int, torch.dtype, int]


class _State(threading.local):
    def __init__(self) -> None:
        self.entries: dict[_Key, Entry] = {}
        self.hooks: Callable[[], object] | None = None
        self.in_frame = False


_state = _State()


def _key(x: Tensor) -> _Key | None:
    if x.is_inference() or x.layout is not torch.strided or x.numel() == 0 or x.is_complex() or x.is_neg():
        return None
    try:
        return (x.untyped_storage()._cdata, int(x.storage_offset()), x.numel(), x.dtype, x._version)
    except (NotImplementedError, RuntimeError):  # tensor subclasses without storage (DTensor, functional wrappers)
        return None


def _entries() -> dict[_Key, Entry]:
    """The live entries, cleared first if the innermost hooks that are not ours have changed since the last call."""
    top = hooks_outside()
    hook = top[0] if top is not None else None
    last = _state.hooks() if _state.hooks is not None else None
    if hook is not last or (hook is None) != (_state.hooks is None):
        _state.entries.clear()
        # compared by identity through a weak reference, because Python reuses ids
        _state.hooks = None if hook is None else _reference(hook)
        region_begins(hook)
    return _state.entries


def _reference(hook: object) -> Callable[[], object]:
    try:
        return weakref.ref(hook)
    except TypeError:  # a callable without weak references
        return lambda: hook


def _insert(x: Tensor, record: Record | None) -> Entry | None:
    key = _key(x)
    if key is None:
        return None
    entries = _entries()

    def drop(reference: object) -> None:
        entry = entries.get(key)
        if entry is not None and entry.tensor is reference:
            # a tensor may die in another thread while this thread clears the entries
            entries.pop(key, None)

    entry = Entry(x, record, drop)
    entries[key] = entry
    return entry


def _find(x: Tensor) -> Entry | None:
    if not _state.entries:
        return None
    key = _key(x)
    entry = _entries().get(key) if key is not None else None
    if entry is None:
        return None
    # the tensor may have other data now (`set_`, `.data =`), and another tensor may have its old storage's address
    known = entry.tensor()
    return entry if known is x or (known is not None and _key(known) == key) else None


def declare(y: Tensor, recompute: Callable[..., Tensor], *sources: Record) -> None:
    """Say that y need not be kept: `recompute(*sources)` returns it again, same shape, dtype and values.

    Args:
        y: The output of an op, any shape; ignored unless it is contiguous, or is [B, C, H, W] in the order
            channels_last, or is [B, H, S, D] or [B, C, S] and its transpose(1, 2) is contiguous.
        recompute: A cheap function of the sources' tensors that holds no tensor itself.
        sources: Records of what y is made from; weights, statistics and RNG states as `stored_exact`.
    """
    if y.is_contiguous():
        _insert(y, Derived(Recipe(recompute), sources))
    elif y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last):
        declare_in_order(y, y.permute(0, 2, 3, 1), partial(pixels_first, recompute), *sources)
    elif y.dim() in (3, 4):
        declare_in_order(y, y.transpose(1, 2), partial(tokens_first, recompute), *sources)


def declare_as(y: Tensor, record: Derived) -> None:
    """Say that y need not be kept: `record` rebuilds it, same shape, dtype, values. Ignored unless y is contiguous."""
    if y.is_contiguous():
        _insert(y, record)


def declare_in_order(y: Tensor, order: Tensor, recompute: Callable[..., Tensor], *sources: Record) -> None:
    """As `declare`, for a y whose view `order` is contiguous; `recompute` returns that view's values."""
    entry = _insert(y, None) if order.is_contiguous() else None
    if entry is not None:
        entry.describe(order, Derived(Recipe(recompute), sources))


def known_record(x: Tensor) -> Record | None:
    """The record that x has already: what its producer declared, or what an earlier consumer keeps."""
    entry = _find(x)
    return None if entry is None else entry.seen_as(x)


def forget(x: Tensor) -> None:
    """Forget what is known of x and of all tensors in its memory: somebody may have written there unseen.

    Who has read such a tensor before gets what is in it now, as in stock, which has saved the tensor itself. A cast
    that was made before stays what it was.
    """
    key = _key(x)
    for other in [] if key is None else [other for other in _state.entries if other[0] == key[0]]:
        _state.entries.pop(other).end(version=other[-1])


def record_of(x: Tensor, codec: Codec = IDENTITY) -> Record:
    """The record of x: what its producer declared, or x itself through `codec`, packed once for all its consumers."""
    return record_in_order_of(x, x, codec)


def whole_record_of(x: Tensor, codec: Codec = IDENTITY) -> Record:
    """The record of x with its padding rows, for consumers that need them or whose first dimensions are not [B, S]."""
    known = known_record(x)
    if not (codec.takes_rows and padding_in(x) is not None if known is None else is_dropped(known)):
        return record_of(x, codec)
    return Stored(codec, *codec.pack(x.detach())) if codec != IDENTITY else Stored(IDENTITY, (x,))


def shared_derivation(x: Tensor, name: Hashable, recompute: Callable[..., Tensor], codec: Codec = IDENTITY) -> Derived:
    """The record of a cheap function of x (a cast) that several consumers of x derive under the same `name`.

    The consumers share one recipe, so the value is rebuilt once per backward.
    """
    source = record_of(x, codec)
    entry = _find(x) or _insert(x, None)
    if entry is None:
        return Derived(Recipe(recompute), (source,))
    # consumers that asked before x was encoded derive their value from x itself
    key = (name, x.shape, x.stride(), entry.describes(x))
    if key not in entry.derivations:
        entry.derivations[key] = Recipe(recompute)
    return Derived(entry.derivations[key], (source,))


def shared_copy(x: Tensor, name: Hashable, make: Callable[[], Tensor], codec: Codec = IDENTITY) -> Record:
    """The record of a copy of x (a narrower cast), kept instead of x; made once for all consumers with that `name`."""
    entry = _find(x) or _insert(x, None)
    if entry is None:
        return keep(make(), codec)
    key = (name, x.shape, x.stride())
    if key not in entry.copies:
        entry.copies[key] = keep(make(), codec)
    return entry.copies[key]


def encoded(x: Tensor, codec: Codec, dtype: torch.dtype) -> Record:
    """The record of ``x.to(dtype)`` through `codec`, even if x could be derived; packed once for all its consumers."""
    if is_compiling():
        return keep(x.detach().to(dtype), codec)
    return shared_copy(x, (codec, dtype), lambda: x.detach().to(dtype), codec)


def record_in_order_of(x: Tensor, order: Tensor, codec: Codec) -> Record:
    """The record of x, made from `order`, another view of the same data; consumers of both views share it.

    This is for heads that lie in memory in a permuted order, in which the other consumers read them. The value is that
    of `order`.
    """
    entry = _find(x)
    known = None if entry is None else entry.seen_as(order)
    if known is not None:
        return known
    if _is_of_few(order):
        # the other tokens would be kept for the first one of a sentence
        order = order.clone()
    if (codec == IDENTITY and rows_left_out(order) is None) or _is_parameter(x):
        return Stored(IDENTITY, (order.clone() if order.is_inference() else order,))
    record = keep_later(order, codec)
    entry = entry or _insert(x, None)
    if entry is not None and entry.record is None:
        entry.describe(order, record)
    return record


def _is_of_few(x: Tensor) -> bool:
    """Whether x is a view of a few elements of an activation."""
    base = x._base
    return base is not None and not isinstance(base, Parameter) and _FEW * x.numel() <= base.numel()


def _is_parameter(x: Tensor) -> bool:
    """Whether x is a parameter or a view of one. It is no activation: it lives anyway, so keeping it costs nothing."""
    return isinstance(x, Parameter) or isinstance(x._base, Parameter)


@contextmanager
def frame() -> Iterator[None]:
    """One forward of a patched model: it begins with an empty registry and, however it ends, leaves nothing behind.

    A frame inside of another one joins it, so that layers of the outer model see what an inner model declares (its last
    norm).
    """
    if _state.in_frame:
        yield
        return
    with another_registry():
        _state.in_frame = True
        yield


@contextmanager
def another_registry() -> Iterator[None]:
    """While the block runs there is no frame, and nothing can be declared; afterwards the registry is as before."""
    before = _state.entries, _state.hooks, _state.in_frame
    _state.entries, _state.hooks, _state.in_frame = {}, None, False
    try:
        yield
    finally:
        _state.entries.clear()
        _state.entries, _state.hooks, _state.in_frame = before


@contextmanager
def apart() -> Iterator[None]:
    """While the block runs, this thread has no frame, no net and no watcher.

    A module is tried so while a forward is in progress: the two must not see each other's records.
    """
    before = dict(vars(current))
    current.__init__()  # type: ignore[misc]
    try:
        with another_registry():
            yield
    finally:
        vars(current).update(before)


def in_frame() -> bool:
    """Whether a forward of a patched model is in progress in this thread."""
    return _state.in_frame


def clear() -> None:
    """Forget every entry of this thread."""
    _state.entries.clear()


def live_entries() -> int:
    """How many tensors of this thread have an entry (for tests and leak checks)."""
    return len(_state.entries)
