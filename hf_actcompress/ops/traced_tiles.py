"""An MLP in tiles of rows as one node of a layer's graph: its own code runs a tile at a time, forward and backward.

The node keeps nothing: its backward is given the input and the weights again (`_tiled`). So where a checkpointed layer
runs again in backward, the MLP does not, as long as nobody reads its output there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..private_apis import above_autograd, without_dispatch_modes
from . import layer_calls
from ._tiled import TiledRun, run_in_tiles
from .autocast import autocast_dtype
from .nodes import node
from .snapshot import Snapshot

# whether the layer that is traced is checkpointed and has so many rows that its MLPs are computed in tiles
_checkpointed: ContextVar[bool] = ContextVar("a checkpointed layer in tiles", default=False)


@contextmanager
def traced_in_tiles(yes: bool) -> Iterator[None]:
    """While the block runs, a checkpointed layer with many rows is traced, or not (`yes`)."""
    token = _checkpointed.set(yes)
    try:
        yield
    finally:
        _checkpointed.reset(token)


def in_tiles() -> bool:
    """Whether a checkpointed layer with many rows is traced."""
    return _checkpointed.get()


@dataclass(frozen=True)
class Tiles:
    """How an MLP is computed in tiles.

    Attributes:
        rows: Of the MLP and the rows of a call: how many of them are computed at a time.
        stock: Of the MLP: its code.
        code: Of a copy of the MLP: the code that backward runs, which may leave out the last product.
    """

    rows: Callable[[nn.Module, int], int]
    stock: Callable[[Any], Callable[[Tensor], Tensor]]
    code: Callable[[Any], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class TiledCall:
    """One call of such an MLP in a layer's code.

    Attributes:
        tiles: How it is computed.
        path: The MLP, by its name in the layer.
        places: Which of the weights in its snapshot want a gradient and are used.
        autocast: The device and the dtype of autocast in the forward; None without it.
        draws: Whether it has dropout.
    """

    tiles: Tiles
    path: str
    places: tuple[int, ...]
    autocast: tuple[str, torch.dtype] | None
    draws: bool

    def of(self, module: nn.Module, given: Mapping[str, Sequence[Any]], runs_again: bool) -> _Running:
        return _Running(self, module)

    def why_not_again(self, again: bool) -> str:
        return "an MLP in tiles draws numbers that no second run can draw again" if self.draws and again else ""


class _Running:
    """One call of an MLP in tiles, for its forward and its backward, which reads nothing from the module."""

    _run: TiledRun | None = None

    def __init__(self, call: TiledCall, module: nn.Module) -> None:
        self._call, tiles = call, call.tiles
        # the code runs for the gradients alone, unless the whole output is asked for
        self._own = Snapshot(
            module, lambda copy: lambda x, whole=False: (tiles.stock if whole else tiles.code)(copy)(x)
        )
        self._stock, self._rows = tiles.stock(module), partial(tiles.rows, module)

    def forward(self, x: Tensor) -> Tensor:
        device, dtype = self._call.autocast or (x.device.type, None)
        stock: Callable[[Tensor], Tensor] = self._stock
        if self._run is None:
            tile = self._rows(x.numel() // x.shape[-1])
        else:
            # a backward runs it again, as it was
            stock, tile = partial(self._own, whole=True), self._run.tile
        with above_autograd(), torch.no_grad(), torch.autocast(device, dtype, dtype is not None, cache_enabled=False):
            y, self._run = run_in_tiles(stock, x, tile, self._own)
        return y

    def backward(self, dy: Tensor, x: Tensor, weights: Sequence[Tensor], needs_x: bool, over_x: bool) -> list[Tensor]:
        assert self._run is not None, "the forward ran before"
        places = self._call.places
        own = [w.detach() for w in self._own.tensors]
        for place, w in zip(places, weights, strict=True):
            own[place] = w.detach().requires_grad_()
        with above_autograd():
            dx, found = self._run.backward(x, dy, own, needs_x=needs_x, over_x=over_x)
        wanted = [grad for place, grad in enumerate(found) if place in places]
        # of no rows no tile has made a gradient
        grads = [torch.zeros_like(w) if grad is None else grad for grad, w in zip(wanted, weights, strict=True)]
        return grads if dx is None else [dx, *grads]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: int, features: int, dtype: torch.dtype, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.call = call
        return TILED(x, list(weights), call, features, dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[3]
        found = TILED_BWD(dy, x, weights, ctx.call, needs_x)
        return None, None, None, *([] if needs_x else [None]), *found


def rows_as_node(module: nn.Module, tiles: Tiles, x: Tensor, draws: bool) -> Tensor:
    """What an MLP returns of x [..., H], in a trace: as one node. `module` is its copy, `draws`: it has dropout."""
    made, dtype = layer_calls.calls_so_far(), autocast_dtype(x)
    count = len(made)
    own = Snapshot(module, tiles.code).tensors
    with without_dispatch_modes(), torch.enable_grad():
        # one row says how many features and which dtype come out, and which weights are used
        given = x.new_empty((1,) * (x.dim() - 1) + (x.size(-1),)).requires_grad_()
        row = tiles.stock(module)(given)
        wanted = [i for i, w in enumerate(own) if w.requires_grad]
        used = torch.autograd.grad(row.sum(), [given, *(own[i] for i in wanted)], allow_unused=True)[1:]
    del made[count:]
    autocast = None if dtype is None else (x.device.type, dtype)
    places = tuple(i for i, grad in zip(wanted, used, strict=True) if grad is not None)
    made.append(TiledCall(tiles, vars(module)[layer_calls.PATH], places, autocast, draws))
    y: Tensor = _Node.apply(count, row.size(-1), row.dtype, x, *(own[i] for i in places))  # type: ignore[no-untyped-call]
    return y


def _like_output(x: Tensor, weights: list[Tensor], call: int, features: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], features), dtype=dtype)


@node(
    "tiled(Tensor x, Tensor[] weights, int call, int features, ScalarType dtype) -> Tensor",
    _like_output,
    pointwise=False,
)
def TILED(x: Tensor, weights: list[Tensor], call: int, features: int, dtype: torch.dtype) -> Tensor:
    """The output [..., features] of x [..., H]."""
    run: _Running | None = layer_calls.running_call(call, x)
    return _like_output(x, weights, call, features, dtype) if run is None else run.forward(x)


def _like_given(x: Tensor, weights: list[Tensor], needs_x: bool) -> list[Tensor]:
    given = [x, *weights] if needs_x else weights
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in given]


@node(
    "tiled_bwd(Tensor dy, Tensor x, Tensor[] weights, int call, bool needs_x, bool over_x=False) -> Tensor[]",
    lambda dy, x, weights, call, needs_x, over_x=False: _like_given(x, weights, needs_x),
    pointwise=False,
)
def TILED_BWD(
    dy: Tensor, x: Tensor, weights: list[Tensor], call: int, needs_x: bool, over_x: bool = False
) -> list[Tensor]:
    """The gradients of x, if it needs one, and of the weights; `over_x`: that of x may be written over x."""
    run: _Running | None = layer_calls.running_call(call, x)
    if run is None:
        return _like_given(x, weights, needs_x)
    return run.backward(dy, x, weights, needs_x, over_x)
