"""Eager attention under the variant "tempo": the same values, the probabilities kept once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .. import compilation
from ..codecs import IDENTITY, Codec
from ..methods.tempo.op import attention_tempo
from ..modules.attention import EAGER_NAME, AttentionMixin, AttentionSettings
from ..modules.base import keeps_for_backward
from ..roles import Role
from .probe import DTYPES, same_bits, shallow_copy, undisturbed
from .rope import RotaryMixin
from .sites import Declined, Site

_Dtypes = tuple[str, str]

# the dtype of the softmax, and the dtype that the probabilities are cast to: BERT, GPT-2, Llama
ROUNDINGS: tuple[_Dtypes, ...] = (("", ""), ("", "value"), ("fp32", "query"))


class EagerAttentionMixin(RotaryMixin):
    """`RotaryMixin`, named in this file so that unpickling a patched layer imports it, which registers our function."""


def find_eager(module: nn.Module, codec: Codec) -> Site | Declined:
    """The site of an attention module whose eager function equals ours, as a probe has shown."""
    stock = eager_function_of(type(module))
    if stock is None or getattr(module, "reorder_and_upcast_attn", False):
        return Declined(Role.ATTENTION, "eager attention of its own making, not transformers' eager_attention_forward")
    for roundings in ROUNDINGS:
        if _same(module, stock, roundings):
            config = module.__dict__["config"]
            settings = AttentionSettings(
                Role.ATTENTION, "eager", codec, "probabilities", config=config, roundings=roundings
            )
            return Site(EagerAttentionMixin, settings)
    return Declined(Role.ATTENTION, "its eager function rounds otherwise than those known (found by a numeric probe)")


def eager_function_of(kind: type) -> Callable[..., Any] | None:
    """The eager attention of the file in which an attention class is written."""
    return getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)


def _same(module: nn.Module, stock: Callable[..., Any], roundings: _Dtypes) -> bool:
    """Compare one call in each dtype, bit by bit."""
    probe = shallow_copy(module)
    probe.training = False
    groups = getattr(module, "num_key_value_groups", 1)
    generator = torch.Generator().manual_seed(0)
    # scores from near zero to some hundreds, at which a softcap changes the values
    scales = torch.tensor([1.0, 30.0])[:, None, None, None]
    q = torch.randn(2, 2 * groups, 7, 16, generator=generator) * scales
    k, v = (torch.randn(2, 2, 7, 16, generator=generator) for _ in range(2))
    try:
        with undisturbed():
            same = all(_same_in(dtype, probe, stock, roundings, q, k, v) for dtype in DTYPES)
            return same and _same_under_autocast(probe, stock, roundings, q, k, v)
    except Exception:
        return False


def _same_in(dtype: torch.dtype, probe: Any, stock: Callable[..., Any], how: _Dtypes, *heads: Tensor) -> bool:
    q, k, v = (x.to(dtype) for x in heads)
    # a mask in fp32 shows in which dtype softmax runs, and where the probabilities are cast
    for mask_dtype in {dtype, torch.float32}:
        mask = torch.zeros(2, 1, 7, 7, dtype=mask_dtype)
        mask[0, :, :, 5:] = torch.finfo(dtype).min
        try:
            expected = stock(probe, q, k, v, mask, scaling=0.25, dropout=0.0)
        except Exception:
            if mask_dtype == dtype:
                return False
            # BERT's eager attention takes no mask that is wider than its values
            continue
        if not all(map(same_bits, _attend(q, k, v, mask, 0.25, 0.0, how, IDENTITY), expected)):
            return False
    return True


def _same_under_autocast(probe: Any, stock: Callable[..., Any], how: _Dtypes, *heads: Tensor) -> bool:
    """Rotary angles give q and k a wider dtype than v, which shows to which of the two the probabilities are cast."""
    q, k, v = heads
    with torch.autocast("cpu", torch.bfloat16):
        heads = q, k, v.bfloat16()
        expected = stock(probe, *heads, None, scaling=0.25, dropout=0.0)
        return all(map(same_bits, _attend(*heads, None, 0.25, 0.0, how, IDENTITY), expected))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, how: _Dtypes, codec: Codec
) -> tuple[Tensor, Tensor]:
    softmax_dtype = torch.float32 if how[0] == "fp32" else None
    probs_dtype = {"": None, "value": v.dtype, "query": q.dtype}[how[1]]
    out, probs = attention_tempo(
        q, k, v, mask, scale, dropout=dropout, softmax_dtype=softmax_dtype, probs_dtype=probs_dtype, codec=codec
    )
    return out.transpose(1, 2).contiguous(), probs


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The module's own eager function, with the probabilities kept once. Stock runs where ours cannot replace it."""
    assert isinstance(module, AttentionMixin)
    settings = module.actcompress
    stock = eager_function_of(module.stock_class)
    assert settings is not None and stock is not None
    plain = not any(kwargs.get(name) is not None for name in _own_keywords(stock))
    eager = not compilation.is_traced() and query.numel() > 0
    if not (plain and eager and keeps_for_backward(query, key, value)):
        return stock(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)  # type: ignore[no-any-return]
    scale = scaling if scaling is not None else query.size(-1) ** -0.5
    return _attend(query, key, value, attention_mask, scale, dropout, settings.roundings, settings.codec)


@cache
def _own_keywords(stock: Callable[..., Any]) -> tuple[str, ...]:
    """Arguments of the stock function that our op does not know: a softcap, sinks, a position bias."""
    standard = inspect.signature(eager_attention_forward).parameters
    own = (name for name in inspect.signature(stock).parameters if name not in standard)
    return (*own, "position_bias", "softcap", "s_aux", "cache")


AttentionInterface.register(EAGER_NAME, eager_attention_forward)
AttentionMaskInterface.register(EAGER_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
