"""Dropout in a traced layer, as two ops: a draw, of which the generator's state is kept, and a product made from it.

While a layer is traced, `torch.nn.functional.dropout` becomes ``dropped(x, drawn(x, p), p)``. The state is kept for
backward, and neither the result nor the mask is: both the result and the gradient are `dropped` of another tensor with
the same state. When the graphs run, the first two are one call of torch's own dropout, so that the mask is stock's bit
by bit and the generator is where stock leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARY = torch.library.Library("hf_actcompress", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("drawn(Tensor x, float p) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])  # type: ignore[no-untyped-call]
_LIBRARY.define("dropped(Tensor x, Tensor state, float p) -> Tensor")  # type: ignore[no-untyped-call]
DRAWN, DROPPED = torch.ops.hf_actcompress.drawn.default, torch.ops.hf_actcompress.dropped.default


@torch.library.register_fake("hf_actcompress::drawn", lib=_LIBRARY)
def _drawn(x: Tensor, p: float) -> Tensor:
    # a state; its size is not known before the draw and is no matter, because it is kept in any case
    return x.new_empty(16, dtype=torch.uint8)


@torch.library.register_fake("hf_actcompress::dropped", lib=_LIBRARY)
def _dropped(x: Tensor, state: Tensor, p: float) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.p = inputs[2]
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    return DROPPED(dy, ctx.saved_tensors[0], ctx.p), None, None


torch.library.register_autograd("hf_actcompress::dropped", _backward, setup_context=_keep, lib=_LIBRARY)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return input
    # a mask is drawn in the order in which the elements lie in memory
    order = sorted(range(input.dim()), key=lambda i: (-input.stride()[i], i))
    x = input.permute(order)
    if inplace or not x.is_contiguous():
        return nn.functional.dropout(input, p, training, inplace)
    y: Tensor = DROPPED(x, DRAWN(x.detach(), float(p)), float(p))
    return y.permute([order.index(i) for i in range(input.dim())])


# on while a layer is traced: torch's function for dropout is the two ops
DROPOUTS: dict[Callable[..., Any], Callable[..., Any]] = {nn.functional.dropout: _dropout}
