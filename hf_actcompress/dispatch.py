"""Which implementation of a function runs: a Triton kernel or the torch reference.

`implementation(name, x)` picks by x's device and by what is installed; `use("reference")` and `use("triton")` are
explicit choices for a block of code and never fall back.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor

from . import reference
from .errors import KernelUnavailableError, UnknownOptionError
from .kernels import KERNELS

CHOICES = ("auto", "reference", "triton")

# of the process, not of a thread or context: backward runs in autograd's own threads, and torch.compile reads it
_choice = "auto"


@contextmanager
def use(choice: str) -> Iterator[None]:
    """Run a block with "reference", "triton" or "auto" implementations. Raises UnknownOptionError for another name."""
    if choice not in CHOICES:
        raise UnknownOptionError("implementation", choice, CHOICES)
    global _choice
    before, _choice = _choice, choice
    try:
        yield
    finally:
        _choice = before


def implementation(name: str, x: Tensor) -> Callable[..., Any]:
    """The function `name` of `reference/`, or the kernel of the same name and signature where one is usable for x."""
    if _choice == "triton" and name not in KERNELS:
        raise KernelUnavailableError(
            f'asked for the Triton kernel of {name!r}; there is none; use "auto" or "reference" for this op'
        )
    if name in KERNELS and (_choice == "triton" or (_choice == "auto" and x.is_cuda and _triton_installed())):
        return _kernel(name)
    function: Callable[..., Any] = getattr(reference, name)
    return function


@cache
def _kernel(name: str) -> Callable[..., Any]:
    module = importlib.import_module(f".kernels.{KERNELS[name]}", __package__)
    function: Callable[..., Any] = getattr(module, name)
    return function


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
