"""Hooks of others: on gradients, on every module, and those by which transformers captures outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

# the module of transformers that captures outputs by hooks
_CAPTURES = "transformers.utils.output_capturing"
# what the first run of a checkpointed layer captured, while the layer runs
_of_first_run: ContextVar[frozenset[str]] = ContextVar("captured in the first run", default=frozenset())


def accumulation_hooks(x: Tensor) -> bool:
    """Whether a hook uses the gradient of a leaf as soon as it has been accumulated."""
    return bool(x._post_accumulate_grad_hooks)


def hooks_on_every_module() -> bool:
    """Whether hooks are set for the calls of all modules (`register_module_forward_hook` and similar functions)."""
    of = torch_module
    forward = of._global_forward_hooks or of._global_forward_pre_hooks
    return bool(forward or of._global_backward_hooks or of._global_backward_pre_hooks)


def is_idle_capture(hook: Any) -> bool:
    """Whether a hook is one with which transformers captures outputs, in a call that captures nothing of its kind.

    A model keeps these hooks on its modules after the first call with ``output_hidden_states=True`` or similar. A call
    that captures hidden states leaves the hooks for attentions idle.
    """
    if getattr(hook, "__module__", None) != _CAPTURES or torch.compiler.is_compiling():
        return False
    kinds = captured_kinds()
    return not kinds or _kind_of(hook) not in {*kinds, None}


def captured_kinds() -> frozenset[str]:
    """What transformers captures in this call, such as "hidden_states"; in a recomputation, what the first run did."""
    if _CAPTURES not in sys.modules or torch.compiler.is_compiling():
        return frozenset()
    return frozenset(sys.modules[_CAPTURES]._active_collector.get() or ()) or _of_first_run.get()


def with_captured_kinds(kinds: frozenset[str], function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in which hooks of these kinds count as wanted, although backward captures nothing."""
    token = _of_first_run.set(kinds)
    try:
        return function(*args)
    finally:
        _of_first_run.reset(token)


def _kind_of(hook: Any) -> str | None:
    """What a hook captures, which only its closure says; None if it does not."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return cells["key"].cell_contents if "key" in cells else None
