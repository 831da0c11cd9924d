"""Attention through transformers' attention interface: our function and its mask are registered under our name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .. import compilation, ops
from ..codecs import IDENTITY, Codec
from ..codecs.table import CODECS, FOR_UNSCALED_SCORES
from ..compiling import is_compiling
from ..config import CompressionConfig
from ..methods.chosen_tokens.model_keys_and_values import keys_and_values
from ..modules.attention import ATTENTION_NAME, AttentionSettings, renamed
from ..modules.base import PLAIN_TENSORS, Settings, keeps_for_backward, settings_of, stock_type
from ..ops import opaque
from ..ops.autocast import autocast_dtype
from ..private_apis import transforms_or_export
from ..records import padding_in, shares_rows
from ..reference import packed_kernel, packed_sdpa
from ..reference.device_rules import on_cpu
from ..reference.sequences import Band, Sequences
from ..roles import Role
from .attention_kernels import fusable, is_wasteful
from .attention_rows import calls_interface
from .eager_attention import find_eager
from .function_copies import constants_of
from .rope import RotaryMixin, calls_rope, why_stock
from .sites import Declined, Site

# a CPU's attention with dropout runs again if it has more probabilities than this; below, the generator's state would
# take more bytes than what stock keeps
_FEW = 512


class RegisteredAttentionMixin(RotaryMixin):
    """`RotaryMixin`, named in this file so that unpickling a patched layer imports it, which registers our function."""


def find_attention(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a module whose forward asks the attention interface for its function by `self.config`."""
    if isinstance(module, PreTrainedModel) or "config" not in module.__dict__ or not calls_interface(type(module)):
        return None
    found = _site(module, config)
    reason = why_stock(type(module)) if isinstance(found, Site) and calls_rope(type(module)) else None
    if isinstance(found, Site) and reason is not None:
        return replace(found, settings=replace(found.settings, note=f"rotary embeddings are stock's: {reason}"))
    return found


def _site(module: nn.Module, config: CompressionConfig) -> Site | Declined:
    name = getattr(module.__dict__["config"], "_attn_implementation", None)
    stored = FOR_UNSCALED_SCORES.get(config.attention, config.attention) if is_unscaled(module) else config.attention
    codec = CODECS[stored]
    if name == "sdpa":
        keeps = "recomputed" if config.attention_variant == "recomputed" else "statistics"
        model_config = module.__dict__["config"]
        # code that compares the name with "sdpa" would take ours for another implementation
        compares = name in constants_of(stock_type(module).forward)
        named = None if compares else renamed(model_config)
        note = "" if stored == config.attention else f"{stored} for {config.attention}: its scores are not scaled"
        settings = AttentionSettings(Role.ATTENTION, "sdpa", codec, keeps, note, config=model_config, renamed=named)
        return Site(RegisteredAttentionMixin, settings)
    if name == "eager" and config.attention_variant == "tempo":
        return find_eager(module, codec)
    return Declined(Role.ATTENTION, _why_not(name, type(module)))


def is_unscaled(module: nn.Module) -> bool:
    """Whether scores are q k^T alone, with a bias for each distance, as in T5.

    Other modules that pass a scaling of 1 have scaled q (Whisper, ESM) or normalised q and k (Gemma 4) before.
    """
    return getattr(module, "scaling", None) == 1.0 and hasattr(module, "has_relative_attention_bias")


def _why_not(name: str | None, kind: type) -> str:
    if name == "eager" and _has_sdpa(kind):
        return 'attn_implementation is "eager", which keeps the probabilities; load the model with "sdpa"'
    if name == "eager":
        return 'attn_implementation is "eager", the only one of this model type; it keeps the probabilities'
    return f"attn_implementation is {name!r}; it keeps what it keeps (flash kernels: q, k, v, output, statistics)"


def _has_sdpa(kind: type) -> bool:
    """Whether the models of the file in which an attention class is written can be loaded with "sdpa"."""
    classes = vars(sys.modules[kind.__module__]).values()
    models = [c for c in classes if isinstance(c, type) and issubclass(c, PreTrainedModel) and c is not PreTrainedModel]
    return any(getattr(model, "_supports_sdpa", False) for model in models)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `sdpa_attention_forward`, keeping no per-layer mask, no repeated heads and no probabilities.

    If stock keeps only q, k, v, output and statistics, stock runs unchanged.
    """
    settings = settings_of(module) or Settings(Role.ATTENTION)
    # None in a compiled graph, which cannot hold this object; layers of chosen tokens are not compiled
    chosen = None if compilation.is_traced() else keys_and_values()
    if chosen is not None:
        key, value, attention_mask = chosen.seen(module, query, key, value, attention_mask, kwargs.get("is_causal"))
    if isinstance(attention_mask, ops.PackedMask) and compilation.is_traced_plan():
        options = {"dropout": dropout, "scaling": scaling, **kwargs}
        exact = settings.codec == IDENTITY
        return opaque.attention(attention_forward, exact, module, query, key, value, attention_mask, **options)
    if isinstance(attention_mask, ops.PackedMask):
        out = _packed(settings, query, key, value, attention_mask, dropout, scaling, kwargs)
        if out is not None:
            return out, None
        attention_mask = attention_mask.values()
    return _attended(settings, module, query, key, value, attention_mask, dropout, scaling, **kwargs), None


def _attended(
    settings: Settings,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    **kwargs: Any,
) -> Tensor:
    """Attention, computed in a way that keeps no more than q, k, v, the output and its statistics."""
    bias = kwargs.pop("position_bias", None)
    stock: Callable[..., Tensor] = partial(_stock, module, dropout=dropout, scaling=scaling, **kwargs)
    if compilation.is_traced():
        return _traced(stock, (query, key, value), attention_mask, bias, settings)
    codec, recomputed = settings.codec, settings.keeps == "recomputed"
    cpu = on_cpu(query)
    keeps_more = recomputed or codec != IDENTITY
    drops = dropout > 0 and cpu and query.numel() // query.size(-1) * key.size(2) > _FEW
    keeps_more = keeps_more or attention_mask is not None or bias is not None or drops
    # calls in which our own op keeps q, k, v and the output even if stock would keep no more
    ours = dropout == 0 and (ops.region_in_progress() is not None or shares_rows(query.transpose(1, 2)))
    plain = kwargs.get("cache") is None and kwargs.get("softcap") is None and query.numel() > 0
    keeps_more = keeps_more or is_wasteful(query, key, value)
    if not ((keeps_more or ours) and plain and _keeps(query, key, value, bias)):
        return stock(query, key, value, attention_mask, bias)
    causal = _is_causal(module, query, attention_mask, kwargs.get("is_causal"))
    if cpu and dropout == 0 and bias is None and not recomputed:
        fused = _fused(query, key, value, attention_mask, causal, scaling, codec)
        if fused is not None:
            return fused
    if not keeps_more:
        return _whole_rows(settings, stock, query, key, value, causal, scaling, kwargs)
    return ops.recomputed_attention(
        stock, query, key, value, attention_mask, bias, is_causal=causal, codec=codec, draws=dropout > 0
    )


def _keeps(*tensors: Tensor | None) -> bool:
    """Whether anything of the call is kept, for its backward or for a second run of its checkpointed layer."""
    region = ops.region_in_progress()
    # reentrant checkpointing runs the layer without gradients first
    first = region is not None and region.is_first and not torch.is_grad_enabled()
    return first or keeps_for_backward(*tensors)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float | None, codec: Codec
) -> Tensor | None:
    """Attention by the CPU's fused kernel; None where torch itself would not take it."""
    # rotated queries and keys are wider than values under autocast; the kernel gets them all in its dtype
    dtype = autocast_dtype(q)
    q, k, v = (x if dtype is None else x.to(dtype) for x in (q, k, v))
    if not fusable(q, k, v, mask, causal):
        return None
    return ops.tokens_first(ops.fused_attention(q, k, v, mask, causal, scale, codec=codec), codec)


def _whole_rows(
    settings: Settings, stock: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, causal: bool,
    scale: float | None, kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attention by a kernel whose results can be kept, with each row a sequence; stock's call where there is none."""
    out = None
    rows = Sequences(q.size(0), q.size(2), tuple(range(0, q.size(0) * q.size(2) + 1, q.size(2))))
    if causal and k.size(2) == q.size(2) and packed_kernel(q, k, v, rows, None) is not None:
        mask = ops.PackedMask(rows, None, _no_mask, q.device)
        out = _packed(settings, q, k, v, mask, 0.0, scale, kwargs)
    return stock(q, k, v, None, None) if out is None else out


def _no_mask() -> Tensor:
    raise AssertionError("rows without padding need no mask")


def _packed(
    settings: Settings, q: Tensor, k: Tensor, v: Tensor, mask: ops.PackedMask, dropout: float, scale: float | None,
    kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """The output [B, T, H, D] of attention without a mask of T x T; None for a call that needs stock's mask."""
    sequences, window = mask.sequences, mask.window
    ordinary = not dropout and all(kwargs.get(name) is None for name in ("cache", "softcap", "position_bias"))
    rows = (sequences.rows, sequences.tokens)
    if not ordinary or any((x.size(0), x.size(2)) != rows or type(x) not in PLAIN_TENSORS for x in (q, k, v)):
        return None
    if transforms_or_export() or compilation.is_traced() or padding_in(q.transpose(1, 2)) is not None:
        return None
    dtype = autocast_dtype(q)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    kernel = "pieces" if on_cpu(q) and fusable(q, k, v, None, True) else None
    if kernel is None and isinstance(sequences, Sequences):
        kernel = packed_kernel(q, k, v, sequences, window)
    keeps = _keeps(q, k, v)
    codec = settings.codec if keeps else IDENTITY
    if kernel is None or (keeps and settings.keeps == "recomputed"):
        attend = partial(_in_pieces, sequences=sequences, window=window, scale=scale)
        real = mask.bounds() if isinstance(sequences, Band) else None
        if not keeps:
            return attend(q, k, v, real)
        return ops.recomputed_attention(attend, q, k, v, real, is_causal=True, codec=codec)
    out = ops.packed_attention(q, k, v, mask.bounds(), sequences, scale, window=window, kernel=kernel, codec=codec)
    return ops.tokens_first(out, codec)


def _in_pieces(
    q: Tensor, k: Tensor, v: Tensor, real: Tensor | None = None, bias: None = None, *, sequences: Sequences | Band,
    window: int | None, scale: float | None,
) -> Tensor:  # fmt: skip
    return packed_sdpa(q, k, v, sequences, window, scale, real)


def _traced(
    stock: Callable[..., Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    bias: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Stock's attention in a graph that keeps q, k and v, not their summands (a layer's output and its LoRA's)."""
    if mask is not None and mask.stride(-1) != 1:
        # Without padding transformers expands a column to a mask, in compiled code only. A CUDA device's fused kernels
        # do not take it, and torch would compute attention from probabilities in fp32, and keep them.
        mask = mask.contiguous()
    if not keeps_for_backward(*qkv, bias):
        return stock(*qkv, mask, bias)
    name = settings.codec_name
    q, k, v = (compilation.keep(x, compilation.part_of(name, part)) for part, x in zip("qkv", qkv, strict=True))
    out = stock(q, k, v, mask, bias)
    if bias is not None and name != compilation.PLAIN and not is_compiling():
        # scores may be large, and statistics do not fit rounded ones: module by module it runs again in backward
        raise NotImplementedError("attention with a bias and a codec is not for plans")
    if settings.keeps == "recomputed":
        return compilation.recompute(out)
    return out if name == compilation.PLAIN else compilation.keep(out, compilation.part_of(name, "output"))


def _is_causal(module: nn.Module, query: Tensor, mask: Tensor | None, asked: bool | None) -> bool:
    """Whether attention is causal, by the rule of `sdpa_attention_forward`."""
    wanted = asked if asked is not None else getattr(module, "is_causal", True)
    return query.size(2) > 1 and mask is None and bool(wanted)


def _stock(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    **kwargs: Any,
) -> Tensor:
    if bias is not None:
        kwargs["position_bias"] = bias
    out: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
    return out


AttentionInterface.register(ATTENTION_NAME, attention_forward)
# an unregistered mask name would make transformers build no mask at all
AttentionMaskInterface.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
