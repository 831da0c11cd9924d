"""`check_up`: one step of a model stock and one patched, on a device: are they equal, what do they keep and take."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...config import CompressionConfig, preset_of, resolve
from ...patching import patched
from ...reporting import patch_report
from ..measurement.allocator import kept_bytes, loss_of, measure_step
from .checkup_report import OF_STOCK, CheckUp, StepFigures
from .gradient_error import loss_and_gradients, relative_error

# the loss may be rounded elsewhere; in units of the dtype's last digit
_LOSS_ROUNDINGS = 4
# floating-point operations of a step for each weight and token, and how many of them in fp64 are not too many: a slow
# CPU takes about a minute for them
_WORK, _MOST_WORK = 6, 2**41
# seconds after which no further round of timed steps begins
_LONG = 30.0
# how many names a fault lists
_NAMED = 3

_Step = tuple[Tensor, dict[str, Tensor]]


def check_up(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    config: CompressionConfig | str = "exact",
    *,
    autocast: torch.dtype | None = None,
    rounds: int = 5,
    room: int | None = None,
) -> CheckUp:
    """Compare a patched step with a stock one: loss and gradients, kept bytes, peak, time.

    A step is right if its gradients have stock's bits; or if their error against fp64 is at most twice stock's own; or,
    where a step in fp64 is too much work, fails or draws other masks of dropout, if they differ from stock's by at most
    the square root of the dtype's machine epsilon, relative, all parameters as one vector. Of a lossy config only the
    loss is judged, and that gradients are finite.

    Args:
        model: A stock model in train mode, on the device to look at: a CPU or a CUDA device. The timed steps add to its
            `.grad`.
        batch: Keyword arguments of the forward, with labels, on that device.
        config: A preset or config.
        autocast: Dtype under which the forwards run; None: without autocast.
        rounds: How often each step is timed, if half a minute is enough for it. Stock and patched alternate, each after
            a step that is not timed, and the least time counts.
        room: Bytes of memory for a step in fp64; None: there is no such step.

    Raises:
        MeasurementError: The forward returned no loss, or memory cannot be measured on this device.
        NothingPatchedError, UnknownOptionError: As `patch_model`.
    """
    asked = resolve(config)
    device = next(model.parameters()).device
    cast = torch.autocast(device.type, autocast) if autocast is not None else nullcontext()
    (loss, stock), (our_loss, ours), line = _both(model, batch, asked, cast)
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()} | {autocast or loss.dtype}
    eps = max(torch.finfo(dtype).eps for dtype in floats)
    same = ours.keys() == stock.keys()
    truth = _in_fp64(model, batch, room) if same else None
    own = None if truth is None else relative_error(stock, truth)
    if own is None or not own <= math.sqrt(eps):
        # none, or one with other masks of dropout
        truth = own = None
    found = CheckUp(
        preset=preset_of(asked),
        exact=asked.lossless,
        device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        patched=line,
        stock_loss=float(loss),
        patched_loss=float(our_loss),
        gradients=len(stock),
        equal_gradients=sum(name in ours and torch.equal(ours[name], x) for name, x in stock.items()),
        difference=relative_error(ours, stock) if same else None,
        bound=math.sqrt(eps),
        stock_error=own,
        patched_error=None if truth is None else relative_error(ours, truth),
        figures=_figures(model, batch, asked, cast, rounds),
        faults=(),
    )
    missing = sorted(ours.keys() ^ stock.keys())
    return replace(found, faults=tuple(_faults(found, _finite(stock), _finite(ours), eps, missing)))


def _finite(found: Mapping[str, Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in found.values())


def _both(
    model: nn.Module, batch: Mapping[str, Tensor], config: CompressionConfig, cast: AbstractContextManager[Any]
) -> tuple[_Step, _Step, str]:
    """A stock step, a patched one, and what was patched."""
    stock = loss_and_gradients(model, batch, cast)
    with patched(model, config):
        return stock, loss_and_gradients(model, batch, cast), patch_report(model).line(config)


def _in_fp64(model: nn.Module, batch: Mapping[str, Tensor], room: int | None) -> dict[str, Tensor] | None:
    """The stock model's gradients with the same weights in fp64; None if that is too much memory or work, or fails."""
    weights = sum(p.numel() for p in model.parameters())
    tokens = next(iter(batch.values())).shape[:2].numel()
    kept = kept_bytes(lambda: model(**batch), next(model.parameters()).device)
    # weights and gradients; of what is kept, at most four times as many bytes
    if room is None or 2 * 8 * weights + 4 * kept > room or _WORK * weights * tokens > _MOST_WORK:
        return None
    wide = {name: x.double() if x.is_floating_point() else x for name, x in batch.items()}
    try:
        return loss_and_gradients(copy.deepcopy(model).double(), wide)[1]
    except RuntimeError:
        # an operation that has no fp64, such as the grouped products of experts, or too little memory after all
        return None


def _faults(found: CheckUp, stock: bool, ours: bool, eps: float, missing: Sequence[str]) -> Iterator[str]:
    """What is wrong, from what was found, whether all gradients of each are finite, and which one of the two lacks."""
    if not stock:
        yield "stock's own gradients are not finite, so nothing can be compared: take another dtype"
        return
    if not ours:
        yield "there are gradients that are not finite"
        return
    if missing:
        yield f"only one of the two has a gradient of {', '.join(missing[:_NAMED])}"
    if not abs(found.patched_loss - found.stock_loss) <= _LOSS_ROUNDINGS * eps * abs(found.stock_loss):
        yield "the loss is another one"
    if not found.exact or found.difference is None or found.equal_gradients == found.gradients:
        return
    if found.stock_error is not None and found.patched_error is not None:
        if not found.patched_error <= OF_STOCK * found.stock_error:
            yield f"the gradients' error is more than {OF_STOCK:g} times stock's"
    elif not found.difference <= found.bound:
        yield "the gradients differ by more than rounding explains"


def _figures(
    model: nn.Module, batch: Mapping[str, Tensor], config: CompressionConfig, cast: AbstractContextManager[Any],
    rounds: int,
) -> tuple[StepFigures, StepFigures]:  # fmt: skip
    """Of stock and of the patched model."""
    device = next(model.parameters()).device

    def forward() -> Tensor:
        with cast:
            return loss_of(model(**batch))

    def step() -> None:
        torch.autograd.backward(forward())

    kept, peaks, seconds = [0, 0], [0, 0], [math.inf, math.inf]
    begin = time.perf_counter()
    for turn in range(rounds):
        if time.perf_counter() - begin > _LONG:
            break
        for side in (0, 1):
            with patched(model, config) if side else nullcontext():
                # it makes the gradients, and warms up
                step()
                if turn == 0:
                    kept[side], peaks[side] = kept_bytes(forward, device), measure_step(step, device).peak_bytes
                seconds[side] = min(seconds[side], _seconds(step, device))
    return StepFigures(kept[0], peaks[0], seconds[0]), StepFigures(kept[1], peaks[1], seconds[1])


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
