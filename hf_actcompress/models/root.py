"""The patched model itself: its forward is bounded by a registry frame, and what is new in it gets patched.

A PreTrainedModel's class must stay (output capture is keyed by it), so the forward is bound on the instance. PEFT calls
`model.forward` directly, past hooks, which an instance attribute survives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..config import CompressionConfig
from ..records import dropping, frame
from .heads import deferred_logits
from .padding import padding_of_call

_ATTRIBUTE = "actcompress_root"
# patch_model, handed in because this package does not know the one above it
_Patch = Callable[[nn.Module, CompressionConfig], object]


class PatchedForward:
    """The forward of a patched model, and the state of its patch. Deep-copies and pickles with the model."""

    def __init__(self, model: nn.Module, config: CompressionConfig, rows: tuple[Any, ...], patch: _Patch) -> None:
        self.model = model
        self.patch = patch
        self.config = config
        self.rows = rows
        self.inner: Callable[..., Any] | None = model.__dict__.get("forward")
        self.adapters = _adapters(model)
        self.active = True

    @property
    def __signature__(self) -> inspect.Signature:
        """The stock signature: Trainer drops dataset columns by it."""
        return inspect.signature(self._stock())

    def _stock(self) -> Callable[..., Any]:
        stock: Callable[..., Any] = self.inner or type(self.model).forward.__get__(self.model)
        return stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:
            # accelerate's `unwrap_model(model, keep_fp32_wrapper=False)` binds what it finds as if it were a function
            args = args[1:]
        if self.inner is None and torch.compiler.is_compiling():
            # torch 2.11 cannot trace how `_stock` binds it
            return type(self.model).forward(self.model, *args, **kwargs)
        if not self.active or torch.compiler.is_compiling():
            return self._stock()(*args, **kwargs)
        self._patch_new_adapters()
        stock = self._stock()
        padding = padding_of_call(self.model, stock, args, kwargs) if self.config.drop_padding else None
        with frame(), dropping(padding), deferred_logits(self.model, stock, args, kwargs) as finished:
            return finished(stock(*args, **kwargs))

    def _patch_new_adapters(self) -> None:
        adapters = _adapters(self.model)
        if adapters != self.adapters:
            self.adapters = adapters
            self.patch(self.model, self.config)


def _adapters(model: nn.Module) -> tuple[str, ...]:
    """Names of the PEFT adapters that have been injected so far."""
    return tuple(getattr(model, "peft_config", None) or ())


def root_module(model: nn.Module) -> nn.Module:
    """The outermost transformers model, e.g. inside a PeftModel; the module itself if it holds none."""
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), model)


def install_root(model: nn.Module, config: CompressionConfig, rows: tuple[Any, ...], patch: _Patch) -> None:
    """Bind the patched forward, or update the one that is there; `patch` is called when adapters have been added."""
    root = root_of(model)
    if root is not None:
        root.rows = rows
        return
    module = root_module(model)
    root = PatchedForward(module, config, rows, patch)
    module.__dict__[_ATTRIBUTE] = root
    module.__dict__["forward"] = root


def root_of(model: nn.Module) -> PatchedForward | None:
    """The patch state of a model, or None."""
    return next((m.__dict__[_ATTRIBUTE] for m in model.modules() if is_root(m)), None)


def is_root(module: nn.Module) -> bool:
    """Whether the module carries a patched forward."""
    return _ATTRIBUTE in module.__dict__


def restore_root(module: nn.Module) -> None:
    """Take the patched forward off; where something has been wrapped around it, make it transparent."""
    root: PatchedForward = module.__dict__.pop(_ATTRIBUTE)
    root.active = False
    if module.__dict__.get("forward") is root:
        if root.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = root.inner
