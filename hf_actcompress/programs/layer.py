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

from ..models.attention import attention_forward
from ..modules.base import PatchedModule, keeps_for_backward
from ..ops.autocast import autocast_dtype
from ..private_apis import hooks_on_every_module, transforms_active
from ..reference.device_rules import device_rules
from .gated_layer import GatedLayer, Places, places_after, places_before, program_after, program_before
from .program import Program

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule

# what the layer hands on to the attention, and what it looks at itself
_KNOWN = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", "cache_position",
    # of packed rows, for kernels that this attention is none of
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
}  # fmt: skip


class ProgramLayerMixin(_Module):
    """A layer that runs as programs; options: its `LayerPrograms`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        settings = self.actcompress
        if settings is not None and len(args) == 1:
            y = settings.options[0].run(args[0], kwargs)
            if y is not None:
                return y
        return super().forward(*args, **kwargs)


@dataclass
class LayerPrograms:
    """The programs of one layer and its parts. Deep-copies and pickles with the layer.

    Attributes:
        keywords: The attention's own keywords -> what reads each off the attention module.
        children: Each part as the entry of its parent's children that it was found in.
        before_weights, after_weights: Where the tensors of each program are.
        calls: How many calls ran as programs.
    """

    parts: GatedLayer
    before: Program
    after: Program
    keywords: Mapping[str, Callable[[Any], Any]]
    children: tuple[tuple[dict[str, Any], str, nn.Module], ...]
    before_weights: Places
    after_weights: Places
    calls: int = 0

    @classmethod
    def of(cls, parts: GatedLayer, keywords: Mapping[str, str]) -> LayerPrograms:
        readers = {name: attrgetter(place) for name, place in keywords.items()}
        children = tuple((part.parent._modules, part.name, part.module) for part in parts.parts())
        programs = program_before(parts), program_after(parts)
        return cls(parts, *programs, readers, children, places_before(parts), places_after(parts))

    def run(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The layer's output; None for a call that goes leaf by leaf."""
        angles = kwargs.get("position_embeddings")
        if type(angles) is not tuple or not kwargs.keys() <= _KNOWN or not self._is_ordinary(x, kwargs):
            return None
        before, after = _tensors(self.before_weights), _tensors(self.after_weights)
        if not (_plain(x, before) and _plain(x, after) and keeps_for_backward(x, *before, *after)):
            return None
        attention: Any = self.parts.attention.module
        q, k, v = self.before(x, *before, *angles)
        cache = kwargs.get("past_key_values")
        if cache is not None:
            k, v = cache.update(k, v, attention.layer_idx)
        options = {name: read(attention) for name, read in self.keywords.items()}
        dropout = attention.attention_dropout if attention.training else 0.0
        heads, _ = attention_forward(attention, q, k, v, kwargs.get("attention_mask"), dropout=dropout, **options)
        self.calls += 1
        y: Tensor = self.after(heads.reshape(*x.shape[:-1], -1), x, *after)
        return y

    def _is_ordinary(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether it is a call in training, of a layer that nobody has changed or looks into."""
        if torch.compiler.is_compiling() or transforms_active() or device_rules() is not None:
            return False
        if x.dim() != 3 or not x.numel() or autocast_dtype(x) is not None or not self._is_unchanged():
            return False
        attention: Any = self.parts.attention.module
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length(attention.layer_idx) > 0:
            return False
        return bool(attention.__dict__["config"]._attn_implementation == "sdpa")

    def _is_unchanged(self) -> bool:
        """Whether all parts are where they were and patched, and nobody wants to see one called."""
        if hooks_on_every_module():
            return False
        for children, name, module in self.children:
            state = module.__dict__
            if children.get(name) is not module or "actcompress" not in state or "forward" in state:
                return False
            if state["_forward_hooks"] or state["_forward_pre_hooks"]:
                return False
            if state["_backward_hooks"] or state["_backward_pre_hooks"]:
                return False
        return True


def _tensors(places: Places) -> list[Any]:
    return [place[0].get(place[1]) if place is not None else None for place in places]


def _plain(x: Tensor, weights: list[Any]) -> bool:
    """Whether all weights are plain parameters in x's dtype. ZeRO-3 gathers its own by hooks that only a call runs."""
    dtype = x.dtype
    for w in weights:
        if w is not None and (type(w) is not nn.Parameter or w.dtype != dtype or hasattr(w, "ds_id")):
            return False
    return True
