"""Ops with and without autograd's share of a call, by torch's dispatch keys."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from operator import or_
from typing import Any

import torch

_AUTOGRAD = reduce(
    or_,
    (
        torch._C.DispatchKeySet(key)
        for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView)
    ),
)


def below_autograd() -> AbstractContextManager[Any]:
    """In this context ops bypass autograd: inside of our Functions it has nothing to do, and it costs host time.

    A mode that sees each op would get composite ops there (linear, reshape), so nothing changes while one is on.
    """
    return nullcontext() if torch._C._len_torch_dispatch_stack() else torch._C._AutoDispatchBelowAutograd()


def above_autograd() -> Any:
    """In this context, inside of `below_autograd`, ops go through autograd again."""
    exclude = torch._C._dispatch_tls_local_exclude_set() - _AUTOGRAD
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), exclude)
