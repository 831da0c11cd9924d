"""act(x), and act(gate) * up, in a forward, by stock's own ops."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def activation_fwd(x: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """stock(x). A kernel computes the row `kind` with `options` instead of calling stock."""
    return stock(x)


def gated_product_fwd(
    gate: Tensor, up: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...] = ()
) -> Tensor:
    """stock(gate) * up, all [..., F]. A kernel computes the row `kind` with `options` instead of calling stock."""
    return stock(gate) * up
