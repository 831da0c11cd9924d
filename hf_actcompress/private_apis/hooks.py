"""Hooks: on saved tensors, on gradients, on every module, and those by which transformers captures outputs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import ReferenceType

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import _CheckpointFrame as CheckpointFrame

from ..compiling import is_compiling

T = TypeVar("T")
R = TypeVar("R")

# the module of transformers that captures outputs by hooks
_CAPTURES = "transformers.utils.output_capturing"
# the module of torch's checkpointed regions
_CHECKPOINT = CheckpointFrame.__module__
# where the answers of a first run are noted, and the context of the second
_ANSWERS = "actcompress_answers"
_CONTEXT = "actcompress_context"

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


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Inside, no saved-tensor hooks are on."""
    off = []
    while (top := innermost_saved_tensor_hooks()) is not None:
        off.append(top)
        pop_saved_tensor_hooks()
    try:
        yield
    finally:
        for hooks in reversed(off):
            push_saved_tensor_hooks(*hooks)


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
    if getattr(hook, "__module__", None) != _CAPTURES or is_compiling():
        return False
    kinds = _captured_kinds()
    return not kinds or _kind_of(hook) not in {*kinds, None}


def as_in_first_run(asked: T, find: Callable[[T], R]) -> R:
    """``find(asked)``; where a checkpointed region runs again, what it was for this object in the first run.

    Hooks may be added or removed in between, and a backward captures nothing. If the second run then took another way
    through the code, it would save other tensors than the first.
    """
    hooks = innermost_saved_tensor_hooks()
    if hooks is None:
        return find(asked)
    try:
        # no call of a function: this runs for each layer
        module = hooks[0].__module__
    except AttributeError:
        return find(asked)
    region = _region_of(hooks[0]) if module == _CHECKPOINT else None
    if region is None:
        return find(asked)
    answers: dict[int, Any] = vars(region).setdefault(_ANSWERS, {})
    if id(asked) not in answers:
        answers[id(asked)] = find(asked)
    found: R = answers[id(asked)]
    return found


def runs_again_in(pack: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let a checkpointed region, if `pack` is the hook of one in its first run, run again inside of a context."""
    region = _region_of(pack)
    if region is not None and not hasattr(region, _CONTEXT):
        again = region.recompute_fn
        setattr(region, _CONTEXT, context)

        def recompute(*args: Any) -> None:
            with context():
                again(*args)

        region.recompute_fn = recompute


def _region_of(pack: Any) -> Any:
    """What torch's checkpoint notes about a region: the same object for the pack hooks of both runs. None elsewhere."""
    if getattr(pack, "__module__", None) != _CHECKPOINT:
        return None
    for cell in inspect.unwrap(pack).__closure__ or ():
        found = cell.cell_contents
        found = found() if isinstance(found, ReferenceType) else found
        if isinstance(found, CheckpointFrame):
            return found
    return None


def _captured_kinds() -> frozenset[str]:
    """What transformers captures in this call, such as "hidden_states"."""
    collected = None if _CAPTURES not in sys.modules else sys.modules[_CAPTURES]._active_collector.get()
    return frozenset(collected or ())


def _kind_of(hook: Any) -> str | None:
    """What a hook captures, which only its closure says; None if it does not."""
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return cells["key"].cell_contents if "key" in cells else None
