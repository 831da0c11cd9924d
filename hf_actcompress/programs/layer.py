"""Patched layers: the programs where a call is one that they know, and the leaf path for every other call.

The look at a call is cheap, because it is taken by every layer in every step. Whatever it does not know goes leaf by
leaf: the stock forward of the layer over its patched children, with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..models.attention import attention_forward
from ..modules.base import HOOKS, PatchedModule, keeps_for_backward
from ..ops.autocast import autocast_dtype
from ..private_apis import transforms_active
from ..reference.device_rules import device_rules
from .gated_layer import GatedLayer, Part, program_after, program_before, weights_after, weights_before
from .program import Program

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule

# what the layer hands on to the attention, and what it looks at itself
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", "cache_position"}
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")


class ProgramLayerMixin(_Module):
    """A layer that runs as programs; options: its `LayerPrograms`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is not None and len(args) == 1:
            y = settings.options[0].run(self, args[0], kwargs)
            if y is not None:
                return y
        return super().forward(*args, **kwargs)


@dataclass
class LayerPrograms:
    """The programs of one layer and its parts. Deep-copies and pickles with the layer.

    Attributes:
        keywords: The attention's own keywords -> what reads each off the attention module.
        calls: How many calls ran as programs.
    """

    parts: GatedLayer
    before: Program
    after: Program
    keywords: Mapping[str, Callable[[Any], Any]]
    calls: int = 0

    @classmethod
    def of(cls, parts: GatedLayer, keywords: Mapping[str, str]) -> LayerPrograms:
        readers = {name: attrgetter(place) for name, place in keywords.items()}
        return cls(parts, program_before(parts), program_after(parts), readers)

    def run(self, layer: nn.Module, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The layer's output; None for a call that goes leaf by leaf."""
        angles = kwargs.get("position_embeddings")
        if not (kwargs.keys() <= _KNOWN and isinstance(angles, tuple) and self._knows(x, kwargs)):
            return None
        before, after = weights_before(self.parts), weights_after(self.parts)
        if not _plain(x, before) or not _plain(x, after) or not keeps_for_backward(x, *before, *after):
            return None
        attention: Any = self.parts.attention.module
        q, k, v = self.before(x, *before, *angles)
        cache = kwargs.get("past_key_values")
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        options = {name: place(attention) for name, place in self.keywords.items()}
        heads, _ = attention_forward(
            attention, q, k, v, kwargs.get("attention_mask"),
            dropout=attention.attention_dropout if attention.training else 0.0, **options,
        )  # fmt: skip
        self.calls += 1
        y: Tensor = self.after(heads.reshape(*x.shape[:-1], -1), x, *after)
        return y

    def _knows(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether the call is an ordinary one in training, on a layer that nobody has changed or looks into."""
        if torch.compiler.is_compiling() or transforms_active() or device_rules() is not None:
            return False
        if x.dim() != 3 or not x.numel() or autocast_dtype(x) is not None:
            return False
        if any(getattr(torch_module, hooks) for hooks in _GLOBAL_HOOKS) or not all(map(_unchanged, self.parts.parts())):
            return False
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(self.parts.attention.module.layer_idx) > 0:
            return False
        config = self.parts.attention.module.__dict__["config"]
        return config._attn_implementation == "sdpa" and not getattr(config, "output_attentions", False)


def _unchanged(part: Part) -> bool:
    """Whether the child is the one that it was, is patched, and nobody wants to see it called."""
    module = part.module
    if part.parent._modules.get(part.name) is not module:
        return False
    state = module.__dict__
    if "forward" in state or "_hf_hook" in state or state.get("actcompress") is None:
        return False
    return not any(state[hooks] for hooks in HOOKS)


def _plain(x: Tensor, weights: list[Any]) -> bool:
    """Whether all weights are plain parameters in x's dtype. ZeRO-3 gathers its own by hooks that only a call runs."""
    for w in weights:
        if w is not None and (type(w) is not nn.Parameter or w.dtype != x.dtype or hasattr(w, "ds_id")):
            return False
    return True
