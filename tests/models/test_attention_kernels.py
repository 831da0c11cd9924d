"""Attention calls for which stock keeps more than q, k and v.

They have no mask. Stock keeps repeated heads (if heads are wider than 256) or probabilities (if k is wider than v).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_actcompress.models.attention import attention_forward
from hf_actcompress.records import frame
from tests.oracle import assert_equal_bits, kept_bytes

# heads of k and v, width of k, width of v -> the elements that are no longer kept for each of the 2 x 6 tokens
CASES = {
    "heads wider than 256": (2, 288, 288, 2 * 2 * 288),
    "k wider than v": (4, 48, 32, 4 * 6),
}


def _attention(kv_heads: int) -> nn.Module:
    module: Any = nn.Module()
    module.num_key_value_groups, module.is_causal = 4 // kv_heads, True
    return module


@pytest.mark.parametrize("name", CASES)
def test_q_k_and_v_are_kept_and_no_more(name: str) -> None:
    kv_heads, width, of_v, saved = CASES[name]
    module, generator = _attention(kv_heads), torch.Generator().manual_seed(0)
    shapes = (2, 4, 6, width), (2, kv_heads, 6, width), (2, kv_heads, 6, of_v)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]

    def run(attend: Callable[..., tuple[Tensor, Any]]) -> Tensor:
        with frame():
            # q, k and v are results here, as those of projections are, because the bytes of leaves are not counted
            return attend(module, *(x * 1.5 for x in leaves), None)[0]

    ours, stock = (torch.autograd.grad(run(f).sin().sum(), leaves) for f in (attention_forward, sdpa_attention_forward))
    assert_equal_bits(ours, stock)
    kept = [kept_bytes(lambda f=f: run(f)) for f in (sdpa_attention_forward, attention_forward)]
    assert kept[0] - kept[1] >= saved * 2 * 6 * 4
