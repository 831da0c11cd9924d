"""Hooks of others: on gradients, on every module, and those by which transformers captures outputs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as torch_module

# the module of transformers that captures outputs by hooks
_CAPTURES = "transformers.utils.output_capturing"


def accumulation_hooks(x: Tensor) -> bool:
    """Whether a hook uses the gradient of a leaf as soon as it has been accumulated."""
    return bool(x._post_accumulate_grad_hooks)


def hooks_on_every_module() -> bool:
    """Whether hooks are set for the calls of all modules (`register_module_forward_hook` and similar functions)."""
    of = torch_module
    forward = of._global_forward_hooks or of._global_forward_pre_hooks
    return bool(forward or of._global_backward_hooks or of._global_backward_pre_hooks)


def is_idle_capture(hook: Any) -> bool:
    """Whether a hook is one with which transformers captures outputs, in a call that captures none.

    A model keeps these hooks on its modules after the first call with ``output_hidden_states=True`` or similar.
    """
    if getattr(hook, "__module__", None) != _CAPTURES or torch.compiler.is_compiling():
        return False
    return not sys.modules[_CAPTURES]._active_collector.get()
