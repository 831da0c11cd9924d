"""act(x), and act(gate) * up, in a forward: stock's bits in one pass over memory, for 16-bit tensors.

torch computes each pointwise op on 16-bit numbers in fp32 and rounds the result. A form in this file does the same in
registers, after each of stock's ops. Whether it has stock's bits depends on exp, erf and tanh (both sides use
libdevice's), on which products and sums each compiler fuses into one instruction, and on the ops of the stock function.
So nothing is assumed: before a form replaces a stock function on a device, both run there on all 65,536 inputs. The
product with up adds one step, whose result fp32 holds exactly (for an fp32 activation it rounds once), and one more
rounding. For it, pairs of all values with other values are tried as well. If no form has all bits, stock's ops run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ..compiling import is_compiling
from .activation import STOCKS, inputs
from .common import DTYPES, INTERPRETED, POINTWISE_TILE, POINTWISE_WARPS, cast, cdiv, divide, exp, on, sigmoid, widened
from .launch import CachedLaunches
from .probe import BROKEN, NARROW, differing, every, identity, paired

_log = logging.getLogger(__name__)

# kind -> the forms to try, each with whether the compiler may fuse a product and a sum into one instruction. torch's
# compiler may do so within one op, but not across two ops, because the first one writes its result to memory
FORMS: dict[str, tuple[tuple[str, bool], ...]] = {
    **{kind: ((kind, True), (kind, False)) for kind in ("silu", "gelu", "gelu_tanh", "quick_gelu")},
    "gelu_new": (("gelu_new", False), ("gelu_fast", False), ("gelu_new_once", False)),
}
# how many values of up each value of gate is paired with, and the tile; the interpreter takes the same time for a tile
# of any size
_PAIRINGS, _TILE = (1, 1 << 16) if INTERPRETED.value else (4, POINTWISE_TILE)


@triton.jit
def _rounded(y, DTYPE: tl.constexpr):
    """fp32 y rounded to DTYPE, and back in fp32."""
    return widened(cast(y, DTYPE))


@triton.jit
def _tanh(x):
    if INTERPRETED:
        away = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x.to(tl.float64))) + 1.0)
        return tl.where(x < 0.0, -away, away).to(tl.float32)
    else:
        return libdevice.tanh(x)


@triton.jit
def stock_value(x, FORM: tl.constexpr, DTYPE: tl.constexpr, OUT: tl.constexpr):
    """f(x) for x in fp32, before the last rounding.

    DTYPE: x's dtype in memory. OUT: the result's dtype. It is wider under autocast, which runs torch.pow and the ops
    after it in fp32.
    """
    if FORM == "silu":
        return divide(x, 1.0 + exp(-x, False), False)
    elif FORM == "gelu":
        return x * 0.5 * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif FORM == "gelu_tanh":
        return 0.5 * x * (1.0 + _tanh(0.7978845608028654 * (x + 0.044715 * (x * x * x))))
    elif FORM == "quick_gelu":
        return x * _rounded(sigmoid(_rounded(1.702 * x, DTYPE), False), DTYPE)
    elif FORM == "gelu_fast":
        scaled = _rounded(0.7978845608 * x, DTYPE)
        series = _rounded(1.0 + _rounded(_rounded(0.044715 * x, DTYPE) * x, DTYPE), DTYPE)
        t = _rounded(_tanh(_rounded(scaled * series, DTYPE)), DTYPE)
        return _rounded(0.5 * x, DTYPE) * _rounded(1.0 + t, DTYPE)
    else:
        # torch's cube on a GPU is two products, each of which rounds; a CPU rounds fp16's only once
        tl.static_assert(FORM == "gelu_new" or FORM == "gelu_new_once")
        square = x * x
        if FORM == "gelu_new":
            square = _rounded(square, OUT)
        cube = _rounded(0.044715 * _rounded(square * x, OUT), OUT)
        t = _rounded(_tanh(_rounded(0.7978845608028654 * _rounded(x + cube, OUT), OUT)), OUT)
        return _rounded(0.5 * x, DTYPE) * _rounded(1.0 + t, OUT)


@CachedLaunches
@triton.jit
def _fwd_kernel(
    gate_ptr, up_ptr, h_ptr, gate_stride, up_stride, width, tiles,
    FORM: tl.constexpr, GATED: tl.constexpr, ACTIVATED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Writes h [rows, width], dense; rows of gate and up are `*_stride` apart. ACTIVATED: act(gate)'s stock dtype."""
    row = (tl.program_id(0) // tiles).to(tl.int64)
    at = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < width
    gate = widened(tl.load(gate_ptr + row * gate_stride + at, mask=mask))
    h = stock_value(gate, FORM, gate_ptr.dtype.element_ty, ACTIVATED)
    if GATED:
        up = widened(tl.load(up_ptr + row * up_stride + at, mask=mask))
        h = _rounded(h, ACTIVATED) * up
    tl.store(h_ptr + row * width + at, cast(h, h_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Form:
    """The way in which a kernel computes a stock function.

    Attributes:
        name: Name of the form.
        fused: Whether products and sums become fused multiply-adds.
        activated: Dtype of act(gate).
        out: Dtype of the result.
    """

    name: str
    fused: bool
    activated: torch.dtype
    out: torch.dtype


def launch(matrices: list[Tensor], form: Form, h: Tensor, tile: int = POINTWISE_TILE) -> Tensor:
    """Write h: act(gate) for [gate], act(gate) * up for [gate, up]. Each is [rows, width] with any row stride."""
    gate, up = matrices[0], matrices[-1]
    rows, width = gate.shape
    tiles = cdiv(width, tile)
    with on(gate):
        _fwd_kernel[(rows * tiles,)](
            gate, up, h, gate.stride(0), up.stride(0), width, tiles,
            FORM=form.name, GATED=len(matrices) == 2, ACTIVATED=DTYPES[form.activated],
            TILE=tile, num_warps=POINTWISE_WARPS, enable_fp_fusion=form.fused,
        )  # fmt: skip
    return h


def activation_fwd(x: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...] = ()) -> Tensor:
    """stock(x), where `kind` is stock's formula. x is read once and the result is written once."""
    y = _one_pass([x], stock, kind)
    return stock(x) if y is None else y


def gated_product_fwd(
    gate: Tensor, up: Tensor, stock: Callable[[Tensor], Tensor], kind: str, options: tuple[float, ...] = ()
) -> Tensor:
    """stock(gate) * up, where `kind` is stock's formula. Both are read once and the product is written once."""
    h = _one_pass([gate, up], stock, kind)
    return stock(gate) * up if h is None else h


def _one_pass(tensors: list[Tensor], stock: Callable[[Tensor], Tensor], kind: str) -> Tensor | None:
    """The kernel's result, or None where stock's ops have to run."""
    gate, up = tensors[0], tensors[-1]
    fit = kind in FORMS and gate.dtype in NARROW and up.dtype == gate.dtype and up.shape == gate.shape
    # when a graph is traced, a compiler fuses stock's ops
    if not fit or gate.numel() == 0 or type(up) is not Tensor or is_compiling():
        return None
    matrices = _rows_where_they_are(tensors)
    form = None if matrices is None else shown_form(stock, kind, gate.dtype, gate.device, len(tensors) == 2)
    if matrices is None or form is None:
        return None
    return launch(matrices, form, torch.empty(gate.shape, dtype=form.out, device=gate.device))


def _rows_where_they_are(tensors: list[Tensor]) -> list[Tensor] | None:
    """Views [rows, width] of the tensors, one row if all are dense; None if stock's result has another layout."""
    if all(x.is_contiguous() for x in tensors):
        return [x.view(1, -1) for x in tensors]
    if any(x.dim() < 2 or x.stride(-1) != 1 for x in tensors):
        return None
    try:
        return [x.view(-1, x.size(-1)) for x in tensors]
    except RuntimeError:
        return None


_forms: dict[Hashable, Form | None] = {}
_showing = threading.RLock()


def forget() -> None:
    """Forget all forms that were shown, because they hold for one target only."""
    _forms.clear()


def shown_form(
    stock: Callable[[Tensor], Tensor], kind: str, dtype: torch.dtype, device: torch.device, gated: bool
) -> Form | None:
    """The form that was shown to have stock's bits on that device under the current autocast; None without one."""
    which = identity(stock)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    key = which, kind, dtype, device, gated, autocast
    if which is None or key in _forms:
        return _forms.get(key)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    with _showing, torch.no_grad():
        if key not in _forms:
            _forms[key] = _show(stock, kind, dtype, device, gated)
        return _forms[key]


def _show(
    stock: Callable[[Tensor], Tensor], kind: str, dtype: torch.dtype, device: torch.device, gated: bool
) -> Form | None:
    """Try the forms of that kind on all inputs, and return the first one that has stock's bits; None if none has."""
    cases = _cases(stock, dtype, device, gated)
    activated = stock(every(dtype, device)).dtype
    reason = f"it has no form for a result in {activated}"
    for name, fused in FORMS[kind] if activated in DTYPES else ():
        form = Form(name, fused, activated, cases[0][1].dtype)
        try:
            wrong = sum(
                differing(launch([x.view(1, -1) for x in args], form, torch.empty_like(expected), _TILE), expected)
                for args, expected in cases
            )
        except BROKEN as error:
            reason = f"it does not run: {type(error).__name__}: {error}"
            continue
        if wrong == 0:
            return form
        reason = f"{wrong} of {sum(expected.numel() for _, expected in cases)} results differ from stock's"
    of = "gated_product_fwd" if gated else "activation_fwd"
    _log.warning(
        "the Triton kernel of %s (%s, %s) is not used on %s: %s; stock's ops run", of, kind, dtype, device, reason
    )
    return None


def _cases(
    stock: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device, gated: bool
) -> list[tuple[list[Tensor], Tensor]]:
    """Arguments and stock's results: every x. For a product: up = 1, which leaves act(gate) unchanged, and pairs."""
    x = every(dtype, device)
    if not gated:
        return [([x], stock(x))]
    pairs = (x, torch.ones_like(x)), paired(dtype, device, _PAIRINGS)
    return [([gate, up], stock(gate) * up) for gate, up in pairs]


def _disagreement(gated: bool, row: str | None, device: torch.device) -> str | None:
    """Why the kernel cannot be used on a device for kind `row`, or any kind; None if it has the bits in some dtype."""
    kinds = [row] if row in FORMS else [kind for kind in FORMS if gated or kind in COMPOSED]
    if any(shown_form(STOCKS[kind], kind, dtype, device, gated) for kind in kinds for dtype in NARROW):
        return None
    return f"it has not stock's bits (kinds {kinds})"


# kinds that stock composes of several ops
COMPOSED = ("gelu_new", "quick_gelu")

PROOFS = {
    "activation_fwd": partial(_disagreement, False),
    "gated_product_fwd": partial(_disagreement, True),
}


def _sample_fwd(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((inputs(*sizes), STOCKS[kind], kind) for kind in COMPOSED)


def _sample_product(*sizes: Any) -> Iterator[tuple[Any, ...]]:
    yield from ((inputs(*sizes), inputs(*sizes), STOCKS[kind], kind) for kind in FORMS)


SAMPLES = {"activation_fwd": _sample_fwd, "gated_product_fwd": _sample_product}
