"""Which implementation of a function runs: a Triton kernel or the torch reference.

`implementation(name, x)` picks by x's device and by what is installed; `use("reference")` and `use("triton")` are
explicit choices for a block of code and never fall back.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor

from .errors import KernelUnavailableError, UnknownOptionError
from .kernels import KERNELS

_choice: ContextVar[str] = ContextVar("hf_actcompress_implementation", default="auto")
CHOICES = ("auto", "reference", "triton")


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Run a block with "reference", "triton" or "auto" implementations. Raises UnknownOptionError for another name."""
    if choice not in CHOICES:
        raise UnknownOptionError("implementation", choice, CHOICES)
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def implementation(name: str, x: Tensor) -> Callable[..., Any]:
    """The function `name` of `reference/`, or the kernel of the same name and signature where one is usable for x."""
    choice = _choice.get()
    if choice == "triton" and name not in KERNELS:
        raise KernelUnavailableError(
            f'asked for the Triton kernel of {name!r}; there is none; use "auto" or "reference" for this op'
        )
    if name in KERNELS and (choice == "triton" or (choice == "auto" and x.is_cuda and _triton_installed())):
        return _function(f"{__package__}.kernels.{KERNELS[name]}", name)
    return _function(f"{__package__}.reference", name)


@cache
def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
