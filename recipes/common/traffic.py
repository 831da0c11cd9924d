"""Counts what a step launches and the bytes that it moves, for ops of torch and Triton kernels.

An op of torch reads each of its arguments once and writes each of its results once. A view moves nothing, and what an
`expand` repeats is read once. A Triton kernel runs in the interpreter, where every load and store is seen: it moves the
bytes at the addresses that it reads and those that it writes, each once per launch, whatever caches do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
# ops that return another view of the same memory, or run no kernel
NO_LAUNCH = (
    "promote_types",
    "detach",
    "_unsafe_view",
    "_reshape_alias",
    "lift_fresh",
    "empty",
    "empty_like",
    "new_empty",
    "alias",
)
# ops that overwrite their first argument without reading it
_OVERWRITTEN = ("copy_", "fill_", "zero_", "bernoulli_", "uniform_", "normal_", "random_")


class Traffic(TorchDispatchMode):
    """Counts while it is entered. `interpreted_launches` tells it about kernels.

    Attributes:
        launches: Number of ops and kernels that run on the device.
        products: Number of matrix products among them.
        attentions: Number of fused attentions among them, forward or backward.
        moved: Name of an op or a kernel -> bytes, without products and attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.products = self.attentions = 0
        self.moved: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return self.moved.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        # the interpreter's own copies do not count
        if func.is_view or name in NO_LAUNCH or _Launch.now is not None:
            return result
        self.launches += 1
        self.products += name in PRODUCTS
        self.attentions += "attention" in name
        if name not in PRODUCTS and "attention" not in name:
            self.moved[name] += op_bytes(name, args, kwargs, result)
        return result

    def kernel(self, name: str, moved: int) -> None:
        """Count one launch of a kernel."""
        self.launches += 1
        self.moved[name] += moved


def op_bytes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """The bytes that an op reads and writes."""
    written = _memory(result)
    read = _memory((args[1:] if name in _OVERWRITTEN else args, {k: v for k, v in kwargs.items() if k != "out"}))
    return sum(written.values()) + sum(read.values())


def _memory(values: Any) -> dict[Any, int]:
    """The memory of the tensors among `values` -> its bytes; each piece of memory once."""
    found = {}
    for x in tree_leaves(values):
        if isinstance(x, Tensor):
            sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
            found[x.data_ptr(), tuple(sizes)] = torch.Size(sizes).numel() * x.element_size() * (x.numel() > 0)
    return found


class _Launch:
    """Records the addresses that one launch touches, in place of the interpreter's library of loads and stores."""

    now: _Launch | None = None

    def __init__(self, library: Any) -> None:
        self._library = library
        # element size -> addresses
        self._read: dict[int, list[Any]] = {}
        self._written: dict[int, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._read.setdefault(np.dtype(dtype).itemsize, []).append(addresses[mask])
        return self._library.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._written.setdefault(values.dtype.itemsize, []).append(addresses[mask])
        return self._library.store(addresses, values, mask)

    def moved(self) -> int:
        touched = [*self._read.items(), *self._written.items()]
        return sum(size * np.unique(np.concatenate(parts)).size for size, parts in touched)


@contextmanager
def interpreted_launches(counter: Traffic) -> Iterator[None]:
    """Tell `counter` each launch of a kernel that runs in Triton's interpreter (`TRITON_INTERPRET=1`)."""
    from triton.runtime import interpreter

    library, launch = interpreter._interpreter, interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        _Launch.now = interpreter._interpreter = seen = _Launch(library)
        try:
            launch(self, *args, **kwargs)
        finally:
            _Launch.now, interpreter._interpreter = None, library
        counter.kernel(self.fn.__name__, seen.moved())

    interpreter.GridExecutor.__call__ = counted
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = launch
