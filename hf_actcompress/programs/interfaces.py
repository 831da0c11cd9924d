"""Functions of transformers' attention interface that this package has no code for: flash, flex, kernels of the hub.

A layer that calls one is cut there: a program, the function, a program. The function gets all that stock hands it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..models.attention_rows import calls_interface
from ..modules.base import stock_type
from .arguments import forward_names
from .tape import Attend

# arguments that a layer may hand on to its attention function
_HANDED = (
    "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch",
)  # fmt: skip
_KNOWN = ("sdpa", "eager")


def interface_name(module: nn.Module) -> str | None:
    """The name under which a module asks transformers' interface for its attention function; None if it does not."""
    if not calls_interface(stock_type(module)):
        return None
    name: str | None = getattr(vars(module).get("config"), "_attn_implementation", None)
    return name


def calls_another(module: nn.Module) -> bool:
    """Whether its attention function is one that we have no code for."""
    return interface_name(module) not in (None, *_KNOWN)


def handed_on(layer: nn.Module) -> dict[str, Any]:
    """A stand-in for each argument that the layer may hand on, to see which of them reach its attention function."""
    if not any(map(calls_another, layer.modules())):
        return {}
    names = forward_names(layer)
    return {name: object() for name in _HANDED if name in names or "kwargs" in names}


def handed_in(options: Mapping[str, Any], handed: Mapping[int, str]) -> tuple[tuple[str, str], ...]:
    """The keywords of a call that are arguments of the layer, and the names of these.

    `handed` has the name of each argument by the id of its stand-in.
    """
    found = [(word, handed[id(value)]) for word, value in options.items() if id(value) in handed]
    return (*found, ("use_cache", "use_cache")) if "use_cache" in options else tuple(found)


def call(part: Attend, module: Any, q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any], options: Any) -> Tensor:
    """The attention's output [B, T, H, D] of q, k and v [B, H, T, D].

    `given` are the arguments of the layer, `options` the keywords of the call that the module itself has.
    """
    function = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]
    handed = {keyword: given[name] for keyword, name in part.handed or () if name in given}
    out: Tensor = function(module, q, k, v, given.get(part.mask), **options, **handed)[0]
    return out
