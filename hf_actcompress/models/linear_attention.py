"""Gated delta nets (Qwen3-Next, Qwen3.5), differentiated a segment of tokens at a time if torch's code computes them.

The forward of such a module looks up the rule among the globals of its modeling file. A patched module that was told
to compute in tiles runs a copy of that forward (function_copies.py), which finds our rule: the same function, with
a backward for some tokens at a time. The kernels of the package fla keep little by themselves and are left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor

from .. import compilation, ops
from ..config import CompressionConfig
from ..modules.base import keeps_for_backward
from ..private_apis import transforms_or_export
from .function_copies import GlobalsCopy, copy_of_forward, read_global

NAME = "torch_chunk_gated_delta_rule"
# in tokens: a chunk of the rule, and a segment of several chunks, long enough to fill a device
_CHUNK, _SEGMENT = 64, 512
# what the rule reads beside its inputs and states
_OPTIONS = ("chunk_size", "use_qk_l2norm_in_kernel")


def segment_of(config: CompressionConfig) -> int:
    """Tokens of a segment, whole chunks of the rule; 0: all at once."""
    if not config.always_in_tiles:
        return 0
    rows = config.tiled_mlp
    return -(-rows // _CHUNK) * _CHUNK if isinstance(rows, int) else _SEGMENT


@cache
def copy_in_segments(stock_class: Any, segment: int) -> GlobalsCopy | None:
    """A copy of the class's forward that finds our rule; None if the forward looks for no such rule."""
    rule = read_global(stock_class, NAME) if segment else None
    return copy_of_forward(stock_class, {NAME: _ours(rule, segment)}) if isinstance(rule, FunctionType) else None


def _ours(stock: Callable[..., Any], segment: int) -> Callable[..., Any]:
    def torch_chunk_gated_delta_rule(
        query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        inputs = query, key, value, g, beta
        if query.size(1) <= segment or not keeps_for_backward(*inputs) or not _is_plain(segment, kwargs):
            return stock(query, key, value, g=g, beta=beta, **kwargs)  # type: ignore[no-any-return]
        options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
        out, state = ops.linear_attention(_Rule(stock, tuple(options.items())), segment, *inputs)
        return out, state if kwargs.get("output_final_state") else None

    return torch_chunk_gated_delta_rule


def _is_plain(segment: int, kwargs: dict[str, Any]) -> bool:
    """Whether each token sees all tokens before it, from the first one of its row on, and the rule is torch's."""
    compiled = compilation.is_traced() and not compilation.is_traced_plan()
    if compiled or transforms_or_export() or "fla" in sys.modules:
        return False
    apart = all(kwargs.get(name) is None for name in ("initial_state", "cu_seqlens", "seq_idx"))
    return apart and segment % kwargs.get("chunk_size", _CHUNK) == 0


@dataclass(frozen=True)
class _Rule:
    """The rule for some tokens and the state before them."""

    stock: Callable[..., tuple[Tensor, Tensor]]
    options: tuple[tuple[str, Any], ...]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        options = dict(self.options)
        return self.stock(q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, **options)
