"""The codecs on the kernels: what they store and what comes back is the reference's."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.codecs import Codec, Float8, IntGroup, TopK
from hf_actcompress.dispatch import use
from hf_actcompress.reference import seed_codecs
from tests.kernels.harness import DEVICE
from tests.oracle import assert_equal_bits

CODECS = {
    "int8": IntGroup(8),
    "int4": IntGroup(4, group_size=32),
    "int4, outliers": IntGroup(4, outliers=3),
    "int2, odd groups": IntGroup(2, group_size=7),
    "e4m3": Float8(),
    "e5m2, rows": Float8("e5m2", None),
    "top-k, bits": TopK(0.3),
    "top-k, index": TopK(0.05),
    "top-k, all as one": TopK(0.1, "global"),
}
# a hidden state; heads before tokens
INPUTS = {"hidden": (2, 9, 96), "heads": (2, 9, 4, 24)}


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("name", CODECS)
def test_stored_and_restored(name: str, shape: str) -> None:
    codec: Codec = CODECS[name]
    x = torch.randn(INPUTS[shape], device=DEVICE).to(torch.bfloat16)
    x = x.transpose(1, 2) if shape == "heads" else x
    expected, meta = codec.pack(x)
    dy = torch.randn(*x.shape[:-1], 5, device=DEVICE).to(torch.bfloat16)
    with use("triton"):
        packed, _ = codec.pack(x)
        y, grad = codec.unpack(packed, meta), codec.grad_weight(dy, packed, meta)
    assert_equal_bits([x.view(torch.uint8) for x in packed], [x.view(torch.uint8) for x in expected])
    assert_equal_bits([y], [codec.unpack(expected, meta)])
    stock = codec.grad_weight(dy, expected, meta)
    assert (grad is None) == (stock is None) and (grad is None or torch.equal(grad, stock))


def test_the_codecs_seed_fixes_what_is_drawn() -> None:
    codec, x = IntGroup(4, rounding="stochastic"), torch.randn(8, 64, device=DEVICE)
    drawn = []
    for _ in range(2):
        seed_codecs(5)
        with use("triton"):
            drawn.append(codec.unpack(*codec.pack(x)))
    assert torch.equal(*drawn)
