"""Marks: how a patched module that is being traced says which of its tensors backward reads, and how each is stored.

A mark is a node in the traced graph. It computes nothing, and `partition.py` takes it out again. Because it is a node,
it is part of the keys of torch's compile caches: the graphs of a stock and a patched model, or of two presets, are
never taken for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..private_apis import exporting, traced_for_any_size

_log = logging.getLogger(__name__)

# what a mark asks for
KEEP = "keep"  # if backward needs this tensor or what is made from it, keep it; do not compute it again
OFFER = "offer"  # as the partitioner likes it; if it is kept, then through the codec
RECOMPUTE = "recompute"  # never keep it: compute it again, also if it is a product
# the codec of what is kept as it is
PLAIN = "identity"

# what runs whenever a mark is traced, inside of the options of the torch.compile that traces: the package fills it
ON_TRACE: list[Callable[[], None]] = []

_LIBRARY = torch.library.Library("hf_actcompress", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("mark(Tensor x, str wish, str codec) -> Tensor")  # type: ignore[no-untyped-call]


def keep(x: Tensor, codec: str = PLAIN) -> Tensor:
    """x [any shape], marked as a tensor that the eager op keeps through the codec of that name in `CODECS`.

    As the functions below it is called while a graph is traced, and never else.
    """
    return _mark(x, KEEP, codec)


def offer(x: Tensor, codec: str) -> Tensor:
    """x [any shape], marked: if the partitioner keeps it, then through this codec."""
    return x if codec == PLAIN else _mark(x, OFFER, codec)


def recompute(x: Tensor) -> Tensor:
    """x [any shape], marked: computed again in backward whatever it costs, as the logits are."""
    return _mark(x, RECOMPUTE, PLAIN)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def any_length() -> bool:
    """Whether the graph that is traced is one for any length, where torch takes constants of an op for inputs, too."""
    return traced_for_any_size()


def _mark(x: Tensor, wish: str, codec: str) -> Tensor:
    if exporting():
        # an exported program is for processes that do not know us
        return x
    if isinstance(x, nn.Parameter):
        # a model that reads a parameter as it would an activation; parameters are kept as they are
        codec = PLAIN
    y: Tensor = torch.ops.hf_actcompress.mark(x, wish, codec)
    return y


@torch.library.register_fake("hf_actcompress::mark", lib=_LIBRARY)
def _traced(x: Tensor, wish: str, codec: str) -> Tensor:
    # every trace of a patched model comes by here
    for note in ON_TRACE:
        note()
    return x.new_empty_strided(x.size(), x.stride())


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return grad, None, None


torch.library.register_autograd("hf_actcompress::mark", _backward, lib=_LIBRARY)


@torch.library.impl(_LIBRARY, "mark", "CompositeExplicitAutograd")
def _run(x: Tensor, wish: str, codec: str) -> Tensor:
    _say_unread()
    # an op never returns its input: compilers reuse the memory
    return x.clone()


@cache
def _say_unread() -> None:
    _log.warning(
        "a patched model was compiled by a backend that does not read what it keeps, so that it keeps what the backend "
        'likes to: use backend="inductor" (the default), or backend="hf_actcompress" for the values of eager mode'
    )
