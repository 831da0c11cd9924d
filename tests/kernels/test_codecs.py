"""With the kernels, codecs store and return the same bits as with the reference."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.codecs import Codec, Float8, IntGroup, Offload, offload
from hf_actcompress.dispatch import use
from hf_actcompress.methods.block_sparse.codec import BlockSparse
from hf_actcompress.methods.pooled.codec import Pooled
from hf_actcompress.methods.row_sample.codec import RowSample
from hf_actcompress.methods.topk.codec import TopK
from hf_actcompress.reference import seed_codecs
from tests.codecs.helpers import assert_weight_gradient
from tests.kernels.harness import DEVICE
from tests.oracle import assert_equal_bits

pytestmark = pytest.mark.daily(3)

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
    "tiles": BlockSparse(),
    "tiles, of all": BlockSparse(0.3, (5, 20), "global"),
    "rows": RowSample(),
    "pooled": Pooled(4),
}
# a hidden state; heads before tokens
INPUTS = {"hidden": (2, 9, 96), "heads": (2, 9, 4, 24)}


@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("name", CODECS)
def test_stored_and_restored(name: str, shape: str) -> None:
    codec: Codec = CODECS[name]
    x = torch.randn(INPUTS[shape], device=DEVICE).to(torch.bfloat16)
    x = x.transpose(1, 2) if shape == "heads" else x
    seed_codecs(0)
    expected, meta = codec.pack(x)
    seed_codecs(0)
    with use("triton"):
        packed, _ = codec.pack(x)
        y = codec.unpack(packed, meta)
    assert_equal_bits([x.view(torch.uint8) for x in packed], [x.view(torch.uint8) for x in expected])
    assert_equal_bits([y], [codec.unpack(expected, meta)])
    if codec != TopK(0.1, "global"):
        with use("triton"):
            assert_weight_gradient(codec, x)


@pytest.mark.parametrize("codec", [IntGroup(8), Float8()], ids=str)
def test_what_torch_has_no_better_product_of_is_unpacked(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    x, dy = torch.randn(4, 64, device=DEVICE), torch.randn(4, 3, device=DEVICE)
    away, meta = Offload(codec).pack(x)
    with monkeypatch.context() as patch:
        # nothing must be copied to the device if no product follows
        patch.setattr(offload, "_to_device", None)
        assert Offload(codec).grad_weight(dy, away, meta) is None
        assert codec.grad_weight(dy, *codec.pack(x)) is None
    with use("triton"):
        ours, theirs = Offload(codec).grad_weight(dy, away, meta), codec.grad_weight(dy, *codec.pack(x))
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)


def test_the_codecs_seed_fixes_what_is_drawn() -> None:
    codec, x = IntGroup(4, rounding="stochastic"), torch.randn(8, 64, device=DEVICE)
    drawn = []
    for _ in range(2):
        seed_codecs(5)
        with use("triton"):
            drawn.append(codec.unpack(*codec.pack(x)))
    assert torch.equal(*drawn)
