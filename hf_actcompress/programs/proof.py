"""Whether the programs of a layer compute what the layer computes: tried on a tiny layer of the same class.

A layer's structure is guessed from its parts. The guess is right if a tiny layer of the class, with the same config but
for sizes, gives stock's outputs and the leaf path's gradients bit by bit, in fp32 and bf16, with and without a mask.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..models.probe import REFUSALS, same_bits
from ..modules.base import Settings, patch_instance, stock_type
from ..private_apis import unset_fake_temporarily
from ..records import frame
from .gated_layer import GatedLayer, find_parts
from .layer import LayerPrograms, ProgramLayerMixin

# patches the leaves of a module
PatchLeaves = Callable[[nn.Module], object]
# keyword of the attention -> where its module has it
Keywords = dict[str, str]
_BATCH, _TOKENS, _HEADS, _HEAD_SIZE, _MLP = 2, 5, 4, 8, 48
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_SPY = "hf_actcompress_spy"

_proved: dict[tuple[Any, ...], Keywords | str] = {}
# one at a time: what an attention was called with is noted in one place
_proving = threading.RLock()


def prove(layer: nn.Module, parts: GatedLayer, patch_leaves: PatchLeaves | None) -> Keywords | str:
    """The attention's keywords if programs of such a layer are right, or why it is not known that they are.

    Asked once for a class and all that its config says but sizes. Without `patch_leaves` nothing new is tried.
    """
    attention: Any = parts.attention.module
    config = attention.__dict__["config"]
    told = {name: value for name, value in config.to_dict().items() if name not in _SIZES}
    of_parts = tuple((part.name, stock_type(part.module), part.settings.variant) for part in parts.parts())
    key = (stock_type(layer), of_parts, json.dumps(told, default=str, sort_keys=True), attention.layer_idx)
    if key not in _proved and patch_leaves is None:
        return "it has not been tried"
    with _proving:
        if key not in _proved and patch_leaves is not None:
            _proved[key] = _proof(layer, config, attention.layer_idx, patch_leaves)
        return _proved[key]


def _proof(layer: nn.Module, config: Any, layer_idx: int, patch_leaves: PatchLeaves) -> Keywords | str:
    try:
        with _undisturbed():
            return _prove(layer, config, layer_idx, patch_leaves)
    except (*REFUSALS, StopIteration) as error:
        return f"a tiny layer of its class cannot be tried: {type(error).__name__}: {str(error)[:100]}"


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on, autocast off, real tensors on the CPU, no random number, whatever the patching runs under."""
    with (
        unset_fake_temporarily(),
        torch.device("cpu"),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        frame(),
    ):
        yield


def _prove(layer: nn.Module, config: Any, layer_idx: int, patch_leaves: PatchLeaves) -> Keywords | str:
    stock = _tiny(stock_type(layer), config, layer_idx)
    keywords = _keywords(stock)
    if isinstance(keywords, str):
        return keywords
    for dtype in (torch.float32, torch.bfloat16):
        stock = stock.to(dtype)
        leaves = copy.deepcopy(stock)
        patch_leaves(leaves)
        programs = copy.deepcopy(leaves)
        parts = find_parts(programs)
        if not isinstance(parts, GatedLayer):
            return f"a tiny layer of its class has other parts: {parts}"
        made = LayerPrograms.of(parts, keywords)
        patch_instance(programs, ProgramLayerMixin, Settings("layer", "program", (made,)))
        for masked in (False, True):
            expected, by_leaf, found = (_step(module, dtype, masked) for module in (stock, leaves, programs))
            if not same_bits(found[0], expected[0]):
                return "its forward is not that of a pre-norm layer with a gated MLP (found by a numeric probe)"
            if not all(map(same_bits, found, by_leaf)):
                return "its gradients are not those of its parts (found by a numeric probe)"
        if made.calls != 2:
            return "its calls are not ordinary ones"
    return keywords


def _tiny(kind: Any, config: Any, layer_idx: int) -> nn.Module:
    """A stock layer of that class with small sizes and random weights; no global random number is drawn."""
    config = copy.deepcopy(config)
    heads = config.num_key_value_heads
    few = _HEADS if heads == config.num_attention_heads else min(heads, _HEADS // 2)
    sizes = (_HEADS * _HEAD_SIZE, _MLP, _HEADS, few, _HEAD_SIZE)
    for name, size in zip(_SIZES, sizes, strict=True):
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    with torch.device("meta"):
        layer: nn.Module = kind(config, layer_idx)
    if next(layer.buffers(), None) is not None:
        raise ValueError("it has buffers")
    layer = layer.to_empty(device="cpu").to(torch.float32).train()
    # a program hands it on to the attention, which draws where stock draws
    _attention_of(layer).attention_dropout = 0.0
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    return layer


def _attention_of(layer: nn.Module) -> Any:
    return next(child for child in layer.children() if hasattr(child, "attention_dropout"))


def _call(dtype: torch.dtype, masked: bool) -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(_BATCH, _TOKENS, _HEADS * _HEAD_SIZE, generator=generator).to(dtype)
    angles = torch.randn(1, _TOKENS, _HEAD_SIZE // 2, generator=generator).repeat(1, 1, 2)
    mask = torch.ones(_TOKENS, _TOKENS, dtype=torch.bool).tril().expand(_BATCH, 1, -1, -1).clone()
    mask[1, :, :, 0] = False
    mask[1, :, 0, 0] = True
    return x, {
        "attention_mask": mask if masked else None,
        "position_ids": torch.arange(_TOKENS)[None],
        "past_key_values": None,
        "use_cache": False,
        "position_embeddings": (angles.cos().to(dtype), angles.sin().to(dtype)),
    }


def _step(layer: nn.Module, dtype: torch.dtype, masked: bool) -> list[Tensor]:
    """The output, and the gradients of the input and all parameters."""
    x, kwargs = _call(dtype, masked)
    x.requires_grad_()
    y = layer(x, **kwargs)
    if not isinstance(y, Tensor):
        raise ValueError("it returns more than a tensor")
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


# what the attention was called with last
_spied: dict[str, Any] = {}


def _spy(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    _spied.clear()
    _spied.update(kwargs)
    return sdpa_attention_forward(module, q, k, v, mask, **kwargs)


AttentionInterface.register(_SPY, _spy)


def _keywords(layer: Any) -> Keywords | str:
    """Which keywords the layer's attention hands to the attention interface, and where it has them from."""
    attention = _attention_of(layer)
    before = attention.config._attn_implementation
    attention.config._attn_implementation = _SPY
    x, kwargs = _call(torch.float32, False)
    layer(x, **kwargs)
    attention.config._attn_implementation = before
    found: Keywords = {}
    for name, value in _spied.items():
        if name == "dropout" or name in kwargs:
            continue
        places = (place for place in (name, f"config.{name}") if _has(attention, place, value))
        place = next(places, None)
        if place is None and value is not None:
            return f"its attention is called with {name}={value!r}, and where that is from is not known"
        if place is not None:
            found[name] = place
    return found


def _has(module: Any, place: str, value: Any) -> bool:
    try:
        return bool(attrgetter(place)(module) == value)
    except AttributeError:
        return False
