"""A function of rows, computed and differentiated a tile of rows at a time: its working memory is that of one tile.

The same idea as Arctic's TiledMLP (arXiv 2506.13996) and StreamBP (arXiv 2506.03077), with the forward computed twice
in total: the second run of a checkpointed layer stops before this function, because its output is not needed there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..codecs import IDENTITY, Codec
from ..records import applied, load_one, record_of, save, stock_only
from ..reference.device_rules import on_cpu
from ..reference.dropout import StateBefore, replayed_rng
from ..reference.tiles import TILE, tiles
from ._linear import no_view
from .autocast import SameAutocast
from .first_order import once_differentiable
from .snapshot import Snapshot, alias

_Rows = Callable[[Tensor], Tensor]
_CHANGED = (
    "a weight of a tiled MLP was written on, or an adapter was merged into one, between forward and backward, which "
    "computes the MLP again; "
    "patch the model with CompressionConfig(tiled_mlp=0)"
)


class KeptFunction(torch.autograd.Function):
    """Returns x unchanged and keeps its record.

    This is a separate node before the one that computes: the second run of a checkpointed layer stops at the last
    tensor that the layer saves, which is this x, and so it does not compute the function.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, codec: Codec) -> Tensor:
        save(ctx, record_of(x, codec))
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


class TiledFunction(torch.autograd.Function):
    """The function itself. It saves nothing if x comes from `KeptFunction`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stock: _Rows,
        tile: int,
        codec: Codec,
        own: Snapshot,
        *weights: Tensor,
    ) -> Tensor:
        ctx.source = x.grad_fn
        if x.grad_fn is None:
            # an input without gradient has no node that could keep it
            save(ctx, record_of(x, codec))
        y, ctx.run = run_in_tiles(stock, x, tile, own)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, is_ours = load_one(ctx if ctx.source is None else ctx.source, dy)
        weights = [
            w.detach().requires_grad_(needed)
            for w, needed in zip(ctx.run.own.tensors, ctx.needs_input_grad[5:], strict=True)
        ]
        dx, grads = ctx.run.backward(x, dy, weights, needs_x=ctx.needs_input_grad[0], over_x=is_ours)
        return dx, None, None, None, None, *grads


class _Sums:
    """Gradients of weights, summed over tiles; in fp32 if the weights are in 16 bits.

    The tiles read aliases of the weights. Each gradient is added to its sum and freed as soon as it is computed.
    """

    def __init__(self, weights: Sequence[Tensor], one_tile: bool) -> None:
        # weights that are not trained, such as quantised ones, are read as they are
        self.aliases = [alias(w, True) if w.requires_grad else w for w in weights]
        self._sums: list[Tensor | None] = [None] * len(weights)
        self._one_tile = one_tile
        for index, x in enumerate(self.aliases):
            if x.requires_grad:
                x.register_post_accumulate_grad_hook(partial(self._add, index))  # type: ignore[no-untyped-call]

    def _add(self, index: int, x: Tensor) -> None:
        gradient, x.grad, known = x.grad, None, self._sums[index]
        assert gradient is not None
        if known is None:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            self._sums[index] = gradient if self._one_tile else gradient.to(wide)
        else:
            _add_to(known, gradient)

    def gradients(self) -> Iterator[Tensor | None]:
        """The gradients, in the weights' dtypes. Each sum is freed when its gradient is taken."""
        for index, x in enumerate(self.aliases):
            total, self._sums[index] = self._sums[index], None
            yield None if total is None else total.to(x.dtype)


def _add_to(total: Tensor, x: Tensor) -> None:
    """total += x. A CPU copies an x of another dtype before it adds, so it gets only some rows of x at a time."""
    if x.dim() < 2 or x.dtype == total.dtype or not on_cpu(x):
        total.add_(x)
        return
    for part in tiles(x, max(1, TILE // x.shape[-1])):
        total[..., part, :].add_(x[..., part, :])


def _in_rows(x: Tensor) -> Tensor:
    """[..., H] as [1, N, H], for code that expects more than two dimensions; an x [N, H] as it is."""
    return x if x.dim() == 2 else x.reshape(1, -1, x.shape[-1])


def forward_in_tiles(stock: _Rows, x: Tensor, tile: int) -> Tensor:
    rows = _in_rows(x)
    y: Tensor | None = None
    if not x.numel():
        return stock(x)
    for part in tiles(rows, tile):
        found = stock(rows[..., part, :])
        if y is None:
            y = found.new_empty((*rows.shape[:-1], found.shape[-1]))
        y[..., part, :] = found
    assert y is not None
    return y.view(*x.shape[:-1], y.shape[-1])


class TiledRun(NamedTuple):
    """What a backward in tiles needs of its forward.

    Attributes:
        again: Of weights and rows: the output, or something with the same gradients.
        tile: The rows of a tile.
        own: The module as it was.
        drawn: The generator's state if random numbers were drawn.
    """

    again: Callable[..., Tensor]
    tile: int
    own: Snapshot
    drawn: StateBefore | None

    def backward(
        self, x: Tensor, dy: Tensor, weights: Sequence[Tensor], *, needs_x: bool, over_x: bool
    ) -> tuple[Tensor | None, Iterator[Tensor | None]]:
        """The gradients of x and of the weights that want one.

        Args:
            x, dy: [..., H].
            weights: The same as the module's, in the same order.
            needs_x: Whether x wants a gradient.
            over_x: Whether it may be written over x: a tile of x is not read again after its gradient is known.
        """
        if not self.own.are_the_same():
            raise RuntimeError(_CHANGED)
        rows, grads, dx = _in_rows(x), _in_rows(dy), None
        sums = _Sums(weights, one_tile=rows.shape[-2] <= self.tile)
        if needs_x:
            dx = rows if over_x else torch.empty_like(rows, memory_format=torch.contiguous_format)
        drawn = replayed_rng(self.drawn.state, self.drawn.device) if self.drawn is not None else nullcontext()
        with stock_only(), drawn:
            for part in tiles(rows, self.tile):
                given = alias(rows[..., part, :], dx is not None)
                with torch.enable_grad():
                    y = self.again(sums.aliases, given)
                wanted = [t for t in (given, *sums.aliases) if t.requires_grad]
                torch.autograd.backward(y, grads[..., part, :], inputs=wanted)
                if dx is not None:
                    dx[..., part, :] = given.grad if given.grad is not None else 0.0
        return None if dx is None else dx.view(x.shape), sums.gradients()


def run_in_tiles(stock: _Rows, x: Tensor, tile: int, own: Snapshot) -> tuple[Tensor, TiledRun]:
    """The output, and what the backward needs; the arguments are those of `tiled`."""
    before = StateBefore(x.device)
    # without autocast's cache, which would hold a cast of each MLP's weights until the whole forward ends
    y = no_view(forward_in_tiles(SameAutocast(stock, x), x, tile))
    return y, TiledRun(SameAutocast(own.run, x), tile, own, before if before.has_changed() else None)


def tiled(x: Tensor, stock: _Rows, tile: int, own: Snapshot, *, codec: Codec = IDENTITY) -> Tensor:
    """``stock(x)`` for a function that computes each row of x by itself, `tile` rows at a time.

    Args:
        x: ``[..., H]``, floating point, of two dimensions or more.
        stock: Stock's code. It gets ``[n, H]`` or ``[1, n, H]`` with n <= tile and returns as many rows. Random numbers
            that it draws are drawn again in backward.
        tile: Rows of a tile, 1 or more.
        own: The module whose code that is, as it is now, and its weights. Its code runs in backward.
        codec: How x is stored if it has to be.

    Returns:
        What stock returns.

    Saves:
        The record of x (nothing if x is derived), the generator's state if the function draws (stock: everything
        inside of it, for all rows). Nothing under ``no_grad``.

    Gradient:
        Exact, first order only: stock's own ops run again on each tile. Weight gradients in 16 bits are summed over
        tiles in fp32, in another order than stock's. If the function draws (dropout), each tile draws its own mask.

    Raises:
        RuntimeError: A weight was written in place, or an adapter was merged into one, before the backward.
    """
    if not torch.is_grad_enabled():
        return forward_in_tiles(stock, x, tile)
    kept = applied(KeptFunction, x, codec) if x.requires_grad else x
    return applied(TiledFunction, kept, stock, tile, codec, own, *own.tensors)
