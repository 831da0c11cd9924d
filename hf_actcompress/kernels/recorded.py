"""Calls of kernels that come again: what they compute and launch, without the Python code in between.

On its way to a launch, a function of a kernel looks at shapes and strides, chooses tiles and a grid, and makes views
and results. That takes a host 10 to 50 us (`recipes/launch_time.py`) and gives the same each time. So a function's
second call of one form (shapes, strides, dtypes and alignments of tensors, other arguments) is recorded, and later
calls repeat its allocations, launches and the few ops of torch beside them. A function that reads values, or takes
tensors from elsewhere, is not recorded.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..compiling import is_compiling
from . import launch
from .watched import Record, record_of

_TENSORS = (Tensor, Parameter)
_CONSTANTS = frozenset(
    {bool, int, float, str, type(None), torch.dtype, types.FunctionType, types.BuiltinFunctionType, type(Tensor.exp)}
)
# how many forms of calls a function remembers
_MOST = 1024


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a kernel, whose calls of a form that came twice before run by records."""
    # None: a form that has no record
    records: dict[Hashable, Record | None] = {}
    came_once: set[Hashable] = set()

    @functools.wraps(function)
    def call(*args: Any, **words: Any) -> Any:
        if words or is_compiling() or not launch.enabled:
            return function(*args, **words)
        tensors: list[Tensor] = []
        form = _form(args, tensors)
        if form is None:
            return function(*args)
        known = records.get(form)
        if known is not None and _is_current(form[0]):
            return known.run(tensors)
        if form in came_once:
            came_once.remove(form)
            found, records[form] = record_of(function, args, tensors)
            return found
        if form not in records:
            if len(records) + len(came_once) >= _MOST:
                records.clear()
                came_once.clear()
            came_once.add(form)
        return function(*args)

    call.records = records  # type: ignore[attr-defined]
    return call


def _form(args: Sequence[Any], tensors: list[Tensor]) -> tuple[Any, ...] | None:
    """What a record depends on, the device first; None for a call that has none. Appends the tensors to `tensors`."""
    form: list[Any] = []
    addresses: set[int] = set()
    for x in args:
        kind = type(x)
        if kind in _TENSORS:
            address = x.data_ptr()
            tensors.append(x)
            addresses.add(address)
            form += (x.shape, x.stride(), x.dtype, address & 15 == 0)
        elif kind in _CONSTANTS:
            # 1, 1.0 and True are equal
            form += (kind, x)
        elif (kind is tuple or kind is list) and all([type(item) in _CONSTANTS for item in x]):
            form += (kind, tuple(x))
        else:
            return None
    # two arguments at one address may be at two in the next call; tensors without elements are at 0
    if not tensors or len(addresses) < len(tensors) or 0 in addresses:
        return None
    device = tensors[0].device
    return None if torch.is_autocast_enabled(device.type) else (device, *form)


def _is_current(device: torch.device) -> bool:
    """Whether launches go to that device. If not, the function itself changes the current device."""
    return device.type != "cuda" or device.index == torch.cuda.current_device()
