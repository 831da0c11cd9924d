"""Marks: while it is traced, a patched module says which tensors backward reads, and how each of them is stored.

A mark is a node in the traced graph. It computes nothing, and `partition.py` removes it. Because it is a node, it is
part of the keys of torch's compile caches, so the graph of a stock model is never used for a patched one, nor that of
one preset for another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compiling import is_traced_plan
from ..private_apis import traced_for_any_size, transforms_or_export

_log = logging.getLogger(__name__)

# the wishes that a mark can have
KEEP = "keep"  # if backward needs this tensor or what is made from it, keep it; do not recompute it
OFFER = "offer"  # let the partitioner decide; if it keeps the tensor, use the codec
RECOMPUTE = "recompute"  # never keep the tensor: recompute it, even if it is the result of a matrix product
# the codec's name for tensors that are kept as they are
PLAIN = "identity"

# how a mark names a module in the place of a codec, and what stands between it and the part of it that is kept
MODULE, PART = "@", ":"

# functions to call when a patched model or a mark is traced, when the options of the tracing torch.compile hold; the
# package fills it
ON_TRACE: list[Callable[[], None]] = []

_LIBRARY = torch.library.Library("hf_actcompress", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("mark(Tensor x, str wish, str codec, int kept) -> Tensor")  # type: ignore[no-untyped-call]
_OP = torch.ops.hf_actcompress.mark.default


def keep(x: Tensor, codec: str = PLAIN) -> Tensor:
    """x [any shape], marked as a tensor that the eager op keeps through the codec of that name in `CODECS`.

    Like the functions below, it may only be called while a graph is traced, and not in an export. A parameter that the
    model reads as if it were an activation is kept as it is.
    """
    return _marked(x, KEEP, PLAIN if isinstance(x, nn.Parameter) else codec)


def part_of(codec: str, name: str) -> str:
    """What marks one of several tensors that a module keeps: the codec's name, or the module's with this part of it."""
    return codec + PART + name if codec.startswith(MODULE) else codec


def offer(x: Tensor, codec: str) -> Tensor:
    """x [any shape], marked: if the partitioner keeps it, then through this codec."""
    return x if codec == PLAIN or isinstance(x, nn.Parameter) else _marked(x, OFFER, codec)


def recompute(x: Tensor, kept: int = 0) -> Tensor:
    """x [any shape], marked: recomputed in backward whatever it costs, as the logits are; kept if it has few bytes.

    Args:
        kept: The most bytes that are kept.
    """
    return _marked(x, RECOMPUTE, PLAIN, kept)


def _marked(x: Tensor, wish: str, codec: str, kept: int = 0) -> Tensor:
    if is_traced_plan():
        # what is kept as it is, the smallest cut decides: under autocast that may be the cast of x
        if codec != PLAIN or wish == RECOMPUTE:
            # beside the graph of autograd: a node in it would add up gradients in another order than stock
            _OP(x.detach(), wish, codec, kept)
        return x
    y: Tensor = _OP(x, wish, codec, kept)
    return y


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def note_trace() -> None:
    """Called where a patched model begins: also one whose layers Dynamo cannot trace, so that there is no mark."""
    if not transforms_or_export():
        for note in ON_TRACE:
            note()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def any_length() -> bool:
    """Whether the graph is traced for any length. torch then turns an op's constants into inputs, too."""
    return traced_for_any_size()


@torch.library.register_fake("hf_actcompress::mark", lib=_LIBRARY)
def _traced(x: Tensor, wish: str, codec: str, kept: int) -> Tensor:
    # every trace of a patched model calls this function
    for note in () if is_traced_plan() else ON_TRACE:
        note()
    return x.new_empty_strided(x.size(), x.stride())


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return grad, None, None, None


torch.library.register_autograd("hf_actcompress::mark", _backward, lib=_LIBRARY)


@torch.library.impl(_LIBRARY, "mark", "CompositeExplicitAutograd")
def _run(x: Tensor, wish: str, codec: str, kept: int) -> Tensor:
    _say_unread()
    # an op must not return its input, because compilers reuse the memory
    return x.clone()


@cache
def _say_unread() -> None:
    _log.warning(
        "a patched model was compiled by a backend that does not read what it keeps, so that it keeps what the backend "
        'likes to: use backend="inductor" (the default), or backend="hf_actcompress" for the values of eager mode'
    )
