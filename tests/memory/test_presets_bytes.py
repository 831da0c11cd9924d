"""What the storage presets keep, counted on the allocator: bytes per token per layer over the hidden size, in bf16.

The bound of a preset: its bytes per element (codes, scales, zero points) times the floor's elements, 11.5 h in a Llama
block (two norm inputs, q, k, v, output, gate, up) and 10 h in BERT's and GPT-2's, and 0.11 h for what is never encoded
(logsumexp, mean and rstd) and for the outlier channels.
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_actcompress import patch_model
from tests.slopes import bert, gpt2, llama, slope

pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = [
    (llama, "int8", 12.5),
    (llama, "fp8", 12.5),
    (llama, "int4", 7.8),
    (bert, "int8", 10.8),
    (bert, "fp8", 10.4),
    (bert, "int4", 7.75),
    (gpt2, "int8", 10.8),
    (gpt2, "int4", 7.75),
    # 5 bits for attention's 2.5 h in a Llama block and 4 h in the others: 11/16 of a byte per element instead of 17/16
    (llama, "int4_attention", 6.86),
    (bert, "int4_attention", 6.25),
    (gpt2, "int4_attention", 6.25),
]


@pytest.mark.parametrize(("build", "preset", "limit"), LIMITS)
def test_kept_bytes(build: Any, preset: str, limit: float) -> None:
    kept = slope(build, prepare=lambda model: patch_model(model, preset), length=128).kept
    assert 0.5 * limit < kept <= limit
