"""Block-sparse activations keep the largest tiles exactly, and the weight gradient is computed from these alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from hf_actcompress.errors import UnknownOptionError
from hf_actcompress.methods.block_sparse.codec import BlockSparse
from tests.codecs.helpers import DTYPES, activations, assert_weight_gradient, roundtrip, token_shapes

QUOTAS = ("column", "row", "global")
codecs = st.builds(
    BlockSparse,
    st.sampled_from((0.05, 0.3, 1.0)),
    st.sampled_from(((1, 1), (4, 8), (32, 32))),
    st.sampled_from(QUOTAS),
)


def tiles_of(x: Tensor, block: tuple[int, int]) -> Tensor:
    """The tiles [rows of tiles, columns of tiles, height, width] of x; those at the edges are padded with zeros."""
    rows = x.reshape(-1, x.size(-1))
    rows = torch.nn.functional.pad(rows, (0, -rows.size(1) % block[1], 0, -rows.size(0) % block[0]))
    return rows.unfold(0, block[0], block[0]).unfold(1, block[1], block[1])


@settings(deadline=None, max_examples=150)
@given(activations(), codecs)
def test_kept_tiles_are_exact_and_as_many_as_declared(x: Tensor, codec: BlockSparse) -> None:
    before = x.clone()
    tensors, meta = codec.pack(x)
    assert sum(t.untyped_storage().nbytes() for t in tensors) == codec.nbytes(x.shape, x.dtype)
    y = codec.unpack(tensors, meta)
    assert y.shape == x.shape and y.dtype == x.dtype and torch.equal(x, before)
    if not x.numel() or not x.dim():
        return
    ours, all_tiles = tiles_of(y, codec.block), tiles_of(x, codec.block)
    same = (ours == all_tiles).all(-1).all(-1)
    assert bool((same | (ours == 0).all(-1).all(-1)).all())
    kept, dropped = all_tiles.double().square().sum((2, 3)) * same, all_tiles.double().square().sum((2, 3)) * ~same
    if codec.quota == "column":
        kept, dropped = kept.t(), dropped.t()
    if codec.quota == "global":
        kept, dropped = kept.reshape(1, -1), dropped.reshape(1, -1)
    k = min(kept.size(1), max(1, math.floor(codec.fraction * kept.size(1) + 0.5)))
    # norms are compared in fp32
    assert bool((dropped.amax(1) <= kept.topk(k, dim=1).values[:, -1] * (1 + 1e-5)).all())


@settings(deadline=None, max_examples=100)
@given(activations(token_shapes), codecs)
def test_weight_gradient_is_that_of_the_unpacked(x: Tensor, codec: BlockSparse) -> None:
    assert_weight_gradient(codec, x)


@pytest.mark.parametrize("quota", QUOTAS)
def test_weight_gradient_over_several_chunks(quota: str) -> None:
    assert_weight_gradient(BlockSparse(0.3, (16, 16), quota), torch.randn(2, 300, 200).bfloat16(), outputs=333)


@pytest.mark.parametrize("quota", QUOTAS)
def test_the_operations_shrink_with_the_tiles(quota: str) -> None:
    x, dy = torch.randn(256, 128), torch.randn(256, 64)
    codec = BlockSparse(0.25, (16, 16), quota)
    packed = codec.pack(x)
    with FlopCounterMode(display=False) as sparse:
        codec.grad_weight(dy, *packed)
    assert sparse.get_total_flops() == 0.25 * 2 * 256 * 128 * 64


@pytest.mark.parametrize("quota", QUOTAS)
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so(quota: str, poison: float, dtype: torch.dtype) -> None:
    x = torch.randn(40, 50).to(dtype)
    x[33, 45] = poison
    y = roundtrip(BlockSparse(0.1, (8, 8), quota), x)
    assert not y[33, 45].isfinite()
    dweight = BlockSparse(0.1, (8, 8), quota).grad_weight(
        torch.ones(40, 3, dtype=dtype), *BlockSparse(0.1, (8, 8), quota).pack(x)
    )
    assert dweight is not None and not bool(dweight[:, 45].isfinite().any())


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownOptionError, match="'column', 'row', 'global'"):
        BlockSparse(quota="tile")
    with pytest.raises(ValueError, match="at least one row"):
        BlockSparse(block=(0, 32))
    with pytest.raises(ValueError, match="fraction"):
        BlockSparse(1.5)
    assert BlockSparse().linear_only and not BlockSparse().lossless
