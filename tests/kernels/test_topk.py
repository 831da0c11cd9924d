"""The kernels put kept entries back into their places, bit by bit, in narrow rows and in wide ones."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress.methods.topk import kernel
from hf_actcompress.methods.topk.reference import topk_grad_weight, topk_pack, topk_unpack
from hf_actcompress.reference import groups
from tests.kernels.harness import DEVICE, DTYPES, check, poisoned, samples

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (3, 300)], ids=str)
@pytest.mark.parametrize("name", ["topk_unpack", "topk_grad_weight"])
def test_samples(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for args in samples(name, dtype, *shape):
        if name == "topk_unpack":
            check(name, args, bitwise=True)
        else:
            with poisoned():
                ours = kernel.topk_grad_weight(*args)
            # both compute the same product of the same rows
            assert torch.equal(ours, topk_grad_weight(*args))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("features", [256, 40_000, 70_001])
@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
def test_widths_of_the_index_and_of_tiles(features: int, share: float, masked: bool) -> None:
    x = torch.randn(2, features, device=DEVICE)
    # the largest entries are at the end, in the last tile
    x[1, : -features // 8] *= 0.01
    packed = topk_pack(x, int(share * features), masked)
    with poisoned():
        ours = kernel.topk_unpack(*packed, features, masked)
    assert torch.equal(ours, topk_unpack(*packed, features, masked))


def test_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups._CHUNK, "cpu", 300)
    monkeypatch.setattr(groups, "CHUNK_ELSEWHERE", 300)
    x, dy = torch.randn(11, 100, device=DEVICE), torch.randn(11, 6, device=DEVICE)
    for masked in (True, False):
        packed = topk_pack(x, 9, masked)
        ours = kernel.topk_grad_weight(dy, *packed, 100, masked)
        assert torch.equal(ours, topk_grad_weight(dy, *packed, 100, masked))
