"""The arguments of a layer's forward other than its input, and their sizes: read off its signature and its config."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, PretrainedConfig

from ..modules.base import stock_type
from .refusal import NotStraight

# arguments of decoders: the output of the encoder, and the mask of its padding
ENCODED, ENCODED_MASK = "encoder_hidden_states", "encoder_attention_mask"
# what the code of a module reads off a cache of keys and values, and off no tensor
_OF_CACHES = {*dir(EncoderDecoderCache(DynamicCache(), DynamicCache()))} - {*dir(Tensor)}


def arguments(layer: nn.Module, mask: Tensor | None, angles: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The arguments of a layer's forward other than its input, as models hand them to their layers."""
    known = {
        "attention_mask": mask,
        "position_embeddings": angles,
        "alibi": None,
        **dict.fromkeys(cache_names(layer)),
        "use_cache": False,
    }
    names = _names_within(layer)
    return {name: value for name, value in known.items() if name in names}


def cache_names(layer: nn.Module) -> list[str]:
    """The arguments of a layer's forward that are caches: those that its code, or that of a module in it, reads so."""
    read = frozenset[str]().union(*(_read_as_caches(stock_type(module).forward) for module in layer.modules()))
    return sorted(read & _names_within(layer))


@cache
def _read_as_caches(forward: Callable[..., Any]) -> frozenset[str]:
    """The names of a forward's arguments of which its code reads what only caches have, such as `update`."""
    function = inspect.unwrap(forward)
    if not isinstance(function, FunctionType):
        return frozenset()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    named = {p.name for p in inspect.signature(function).parameters.values() if p.kind not in several}
    found = set()
    for before, step in pairwise(dis.get_instructions(function)):
        if before.opname.startswith("LOAD_FAST") and step.argval in _OF_CACHES:
            # newer Pythons load two names by one instruction
            found.add(before.argval[-1] if isinstance(before.argval, tuple) else before.argval)
    return frozenset(found & named - {"self"})


def _names_within(layer: nn.Module) -> set[str]:
    """The names of a layer's arguments, and of its children's if it hands keyword arguments on to them."""
    names = {*forward_names(layer)}
    return names.union(*map(forward_names, layer.children())) if "kwargs" in names else names


def further_arguments(
    layer: nn.Module, tokens: int, sources: int, make: Callable[[tuple[int, ...], type], Tensor]
) -> dict[str, Tensor]:
    """Further arguments that some layers take: T5's position biases and encoder states, and ALiBi's biases (Falcon).

    Args:
        layer: The layer that may take them.
        tokens, sources: The numbers of tokens of the decoder and of the encoder.
        make: Makes a tensor of a shape, of floats or of bools; a size of -1 is that of the batch.
    """
    names = forward_names(layer)
    if "alibi" in names and getattr(config_of(layer), "alibi", False):
        return {"alibi": make((-1, config_of(layer).num_attention_heads, 1, tokens), float)}
    if "position_bias" not in names:
        return {}
    heads, width = config_of(layer).num_attention_heads, width_of(layer)
    found = {"position_bias": make((1, heads, tokens, tokens), float)}
    if getattr(layer, "is_decoder", False):
        found[ENCODED] = make((-1, sources, width), float)
        found[ENCODED_MASK] = make((-1, 1, 1, sources), bool)
        found["encoder_decoder_position_bias"] = make((1, heads, tokens, sources), float)
    return found


def forward_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the arguments of a module's stock forward, in order: the first one is `self`."""
    return tuple(inspect.signature(inspect.unwrap(stock_type(module).forward)).parameters)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """The dtype that most weights have."""
    sizes: dict[torch.dtype, int] = {}
    for weight in layer.parameters():
        sizes[weight.dtype] = sizes.get(weight.dtype, 0) + weight.numel()
    if not sizes:
        raise NotStraight("it has no weights")
    return max(sizes, key=lambda dtype: sizes[dtype])


def config_of(layer: nn.Module) -> Any:
    found = next((m.__dict__["config"] for m in layer.modules() if "config" in m.__dict__), None)
    if not isinstance(found, PretrainedConfig):
        raise NotStraight("none of its modules has a config")
    return found


def configs_of(layer: nn.Module) -> dict[int, Any]:
    """All configs of a layer by their ids: the memo of a copy that shares them."""
    return {id(v): v for m in layer.modules() for v in vars(m).values() if isinstance(v, PretrainedConfig)}


def width_of(layer: nn.Module) -> int:
    width = getattr(config_of(layer), "hidden_size", None)
    if not isinstance(width, int):
        raise NotStraight("its config names no hidden_size")
    return width


def head_width(layer: nn.Module) -> int:
    """The width of the angles: a head, or the part of it that is rotated."""
    share = (getattr(config_of(layer), "rope_parameters", None) or {}).get("partial_rotary_factor") or 1.0
    for module in layer.modules():
        if isinstance(getattr(module, "rotary_ndims", None), int):
            return int(module.rotary_ndims)  # type: ignore[arg-type]
        for name in ("head_dim", "head_size"):
            if isinstance(getattr(module, name, None), int):
                return int(share * getattr(module, name))
    return 2


def position_bias(attention: Any, queries: int, keys: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[1, H, queries, keys], as the attention makes it in its forward.

    Args:
        attention: A module like T5's.
        queries, keys: How many tokens.
        device: Device of the result.
        dtype: Dtype of the queries.
    """
    if attention.has_relative_attention_bias:
        bias: Tensor = attention.compute_bias(queries, keys, device=device)
        return bias
    bias = torch.zeros((1, attention.n_heads, queries, keys), device=device, dtype=dtype)
    return bias.requires_grad_(getattr(attention, "gradient_checkpointing", False) and attention.training)
