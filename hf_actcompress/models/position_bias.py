"""Position biases of T5's attention where a call gives none: the attention's own, or zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
