"""Hooks: on saved tensors, on gradients, on every module, and those by which transformers captures outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

# the module of transformers that captures outputs by hooks
_CAPTURES = "transformers.utils.output_capturing"
# what the first run of a checkpointed layer captured, while the layer runs
_of_first_run: ContextVar[frozenset[str]] = ContextVar("captured in the first run", default=frozenset())

# The pack and unpack hooks that are on in this thread, or None. These three are not functions of ours, because
# the net calls them around each of our ops, and a call costs time
innermost_saved_tensor_hooks: Callable[[], tuple[Any, Any] | None] = partial(
    torch._C._autograd._top_saved_tensors_default_hooks, False
)
# takes the innermost saved-tensor hooks off
pop_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
# puts saved-tensor hooks on: pack, unpack
push_saved_tensor_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks


def saved_tensor_hooks_allowed() -> bool:
    """Whether saved-tensor hooks may be installed here: torch.func forbids them inside of its transforms."""
    allowed: bool = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    return allowed


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
    kinds = _captured_kinds()
    return not kinds or _kind_of(hook) not in {*kinds, None}


def captured_alike(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint function that runs a layer again with the hooks wanted that were wanted in its first run.

    Backward captures nothing. A hook that is idle there would let the layer run another way, and save other tensors.
    """
    kinds = _captured_kinds()
    return partial(_checkpoint, checkpoint, kinds) if kinds else checkpoint


def _checkpoint(checkpoint: Callable[..., Any], kinds: frozenset[str], layer: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(partial(_run, kinds, layer), *args)


def _run(kinds: frozenset[str], layer: Callable[..., Any], *args: Any) -> Any:
    token = _of_first_run.set(kinds)
    try:
        return layer(*args)
    finally:
        _of_first_run.reset(token)


def _captured_kinds() -> frozenset[str]:
    """What transformers captures in this call, such as "hidden_states"; in a recomputation, what the first run did."""
    if torch.compiler.is_compiling() or _CAPTURES not in sys.modules:
        return frozenset()
    collected = sys.modules[_CAPTURES]._active_collector.get()
    return _of_first_run.get() if collected is None else frozenset(collected)


def _kind_of(hook: Any) -> str | None:
    """What a hook captures, which only its closure says; None if it does not."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return cells["key"].cell_contents if "key" in cells else None
