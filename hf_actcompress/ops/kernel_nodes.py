"""Functions that a device has a kernel for, as single nodes of a layer's graph.

While a layer is traced, a patched module calls the functions of `traced_kernels` in the place of its stock code where
`dispatch` has a kernel for its device. Each is an op for the tracer, with the shapes of the reference; when the graph
runs, the function of `dispatch` is called itself (`nodes`). In a forward a kernel may compute what has stock's bits
(`kernels/__init__.py`).

RMSNorm is two nodes: the statistic, which is kept, and the output, which is made of x and the statistic. A forward
computes both by one kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import chosen, implementation, runs_kernel
from ..kernels import KERNELS, TORCH_HAS
from ..private_apis import FakeTensor, without_dispatch_modes
from ..reference.device_rules import device_rules
from ..reference.table import FUNCTIONS
from .autocast import SameAutocast
from .nodes import node

_Stock = Callable[[Tensor], Tensor]


class _Known(NamedTuple):
    """A stock function, and the same under the autocast of the trace."""

    stock: _Stock
    same: SameAutocast

    def under_autocast(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """What `run` gives under that autocast."""
        dtype = self.same.dtype
        if dtype is None:
            return run(*args)
        with torch.autocast(self.same.device, dtype, cache_enabled=False):
            return run(*args)


# the stock functions that nodes name by their place here, and the place of each
_stocks: list[_Known] = []
_places: dict[Any, int] = {}
_left_to_a_compiler: ContextVar[bool] = ContextVar("whether a compiler makes the code", default=False)


@contextmanager
def left_to_a_compiler(yes: bool) -> Iterator[None]:
    """While the block runs, no function has a kernel if a compiler makes the code: it fuses stock code itself."""
    token = _left_to_a_compiler.set(yes)
    try:
        yield
    finally:
        _left_to_a_compiler.reset(token)


def has_kernel(name: str, x: Tensor, row: str | None = None) -> bool:
    """Whether the device of x, a tensor without data, runs a kernel for a function of `reference/`."""
    if _left_to_a_compiler.get():
        return False
    rules = device_rules()
    if rules is not None:
        return not rules.on_cpu and name in KERNELS and row not in TORCH_HAS.get(name, ())
    with without_dispatch_modes():
        return runs_kernel(name, torch.empty(1, dtype=x.dtype, device=x.device), row)


def _function(name: str, x: Tensor, row: str | None = None) -> Callable[..., Any]:
    """What runs for x. A plan's code is tried on tensors without data first, for which no kernel can be asked."""
    if chosen() == "triton" and isinstance(x, FakeTensor):
        return FUNCTIONS[name]
    return implementation(name, x, row)


def _dtype_of_norm(x: Tensor, weight: Tensor | None, formula: str) -> torch.dtype:
    row = x.new_empty(1, x.size(-1))
    return FUNCTIONS["rms_norm_rebuild"](row, row.new_empty(1, 1, dtype=torch.float32), weight, formula).dtype  # type: ignore[no-any-return]


@node(
    "rms_rstd(Tensor x, Tensor? weight, float? eps, str formula) -> Tensor",
    lambda x, weight, eps, formula: x.new_empty((*x.shape[:-1], 1), dtype=torch.float32),
    pointwise=False,
)
def RSTD(x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> Tensor:
    """rstd [..., 1] of x, in fp32."""
    return rms_norm_parts(x, weight, eps, formula)[1]


def rms_norm_parts(x: Tensor, weight: Tensor | None, eps: float | None, formula: str) -> tuple[Tensor, Tensor]:
    """y and rstd, by one call."""
    y, rstd = _function("rms_norm_fwd", x, formula)(x, weight, eps, formula)
    return y, rstd


@node(
    "rms_normed(Tensor x, Tensor rstd, Tensor? weight, str formula) -> Tensor",
    lambda x, rstd, weight, formula: x.new_empty(x.shape, dtype=_dtype_of_norm(x, weight, formula)),
)
def NORMED(x: Tensor, rstd: Tensor, weight: Tensor | None, formula: str) -> Tensor:
    """y like x, of x and rstd."""
    y: Tensor = _function("rms_norm_rebuild", x, formula)(x, rstd, weight, formula)
    return y


@node(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, str formula, Tensor? residual=None) -> Tensor",
    lambda dy, x, weight, rstd, formula, residual=None: x.new_empty(x.shape),
    pointwise=False,
)
def NORM_BWD(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, formula: str, residual: Tensor | None = None
) -> Tensor:
    """The gradient of x, and with `residual` the sum of both."""
    run = _function("rms_norm_bwd", dy, formula)
    return run(dy, x, weight, rstd, formula, (True, False), residual)[0]  # type: ignore[no-any-return]


@node(
    "rms_norm_bwd_both(Tensor dy, Tensor x, Tensor weight, Tensor rstd, str formula, Tensor? residual=None)"
    " -> (Tensor, Tensor)",
    lambda dy, x, weight, rstd, formula, residual=None: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    pointwise=False,
)
def NORM_BWD_BOTH(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, formula: str, residual: Tensor | None = None
) -> Any:
    """The same, and the gradient of the weight."""
    return _function("rms_norm_bwd", dy, formula)(dy, x, weight, rstd, formula, (True, True), residual)


@node(
    "rotated(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype)),
)
def ROTATED(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = _function("rope_fwd", x)(x, cos, sin)
    return y


@node(
    "rotated_bwd(Tensor dy, Tensor cos, Tensor sin, ScalarType dtype) -> Tensor",
    lambda dy, cos, sin, dtype: torch.empty_like(dy, dtype=dtype),
)
def ROTATED_BWD(dy: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    dx: Tensor = _function("rope_bwd", dy)(dy, cos, sin, dtype)
    return dx


def _like_stock(x: Tensor, stock: int, kind: str, options: Sequence[float]) -> Tensor:
    return x.new_empty(x.shape, dtype=_stocks[stock].same(x.new_empty(1)).dtype)


@node("activated(Tensor x, int stock, str kind, float[] options) -> Tensor", _like_stock)
def ACTIVATED(x: Tensor, stock: int, kind: str, options: Sequence[float]) -> Tensor:
    known = _stocks[stock]
    return known.under_autocast(_function("activation_fwd", x, kind), x, known.stock, kind, tuple(options))


@node(
    "activated_bwd(Tensor dy, Tensor x, str kind, float[] options) -> Tensor",
    lambda dy, x, kind, options: x.new_empty(x.shape),
)
def ACTIVATED_BWD(dy: Tensor, x: Tensor, kind: str, options: Sequence[float]) -> Tensor:
    dx: Tensor = _function("activation_bwd", dy, kind)(dy, x, kind, tuple(options))
    return dx


def _like_product(gate: Tensor, up: Tensor, stock: int, kind: str, options: Sequence[float]) -> Tensor:
    activated = _stocks[stock].same(gate.new_empty(1)).dtype
    return gate.new_empty(gate.shape, dtype=torch.promote_types(activated, up.dtype))


@node("gated(Tensor gate, Tensor up, int stock, str kind, float[] options) -> Tensor", _like_product)
def GATED(gate: Tensor, up: Tensor, stock: int, kind: str, options: Sequence[float]) -> Tensor:
    """stock(gate) * up."""
    known = _stocks[stock]
    run = _function("gated_product_fwd", gate, kind)
    return known.under_autocast(run, gate, up, known.stock, kind, tuple(options))


@node(
    "gated_bwd(Tensor dh, Tensor gate, Tensor up, int stock, str kind, float[] options) -> (Tensor, Tensor)",
    lambda dh, gate, up, *_: (gate.new_empty(gate.shape), up.new_empty(up.shape)),
)
def GATED_BWD(dh: Tensor, gate: Tensor, up: Tensor, stock: int, kind: str, options: Sequence[float]) -> Any:
    """The gradients of gate and up."""
    return _function("gated_product_bwd", dh, kind)(
        dh, gate, up, _stocks[stock].same, kind, tuple(options)
    )  # fmt: skip


@node(
    "gated_and_bwd(Tensor dh, Tensor gate, Tensor up, int stock, str kind, float[] options)"
    " -> (Tensor, Tensor, Tensor)",
    lambda dh, gate, up, *row: (_like_product(gate, up, *row), gate.new_empty(gate.shape), up.new_empty(up.shape)),
    pointwise=False,
)
def GATED_AND_BWD(dh: Tensor, gate: Tensor, up: Tensor, stock: int, kind: str, options: Sequence[float]) -> Any:
    """The product again, and both gradients. A kernel may write the product over dh."""
    run = _function("gated_product_and_bwd", dh, kind)
    return run(dh, gate, up, _stocks[stock].same, kind, tuple(options), dh.dtype, True)


def place_of(stock: Any, x: Tensor, kind: str, options: Sequence[float]) -> int:
    """The place of a stock function under the autocast of now. Kind and options say which one of its class it is."""
    same = SameAutocast(stock, x)
    key = getattr(stock, "func", stock), kind, tuple(options), same.device, same.dtype
    if key not in _places:
        _places[key] = len(_stocks)
        _stocks.append(_Known(stock, same))
    return _places[key]
