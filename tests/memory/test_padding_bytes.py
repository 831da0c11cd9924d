"""Bytes that `drop_padding` saves, counted on the allocator. Units as in tests/slopes.py."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model
from tests.slopes import BATCH, VOCAB, bert, llama, slope

HIDDEN, LENGTH = 256, 128
BUILDS = {"bert": bert, "llama": llama}
INT8 = {"linear": "int8", "norm": "int8", "mlp": "int8", "attention": "int8"}
CODECS: dict[str, dict[str, str]] = {"identity": {}, "int8": INT8}

# per layer, however many tokens: the generator's state before each of two dropouts
STATES = {"bert": 2 * torch.get_rng_state().numel(), "llama": 0}


def padded_batch(share: float) -> dict[str, Tensor]:
    """Right-padded, the second sequence more than the first."""
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    gone = round(share * mask.numel())
    for row, count in ((0, gone // 3), (1, gone - gone // 3)):
        mask[row, LENGTH - count :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@lru_cache
def kept(name: str, codec: str, share: float, drop: bool) -> float:
    def prepare(model: Any) -> Any:
        return patch_model(model, CompressionConfig(drop_padding=drop, **CODECS[codec]))

    return slope(partial(BUILDS[name], hidden=HIDDEN), prepare=prepare, batch=padded_batch(share), length=LENGTH).kept


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(("codec", "share"), [("identity", 0.3), ("identity", 0.5), ("int8", 0.5)])
def test_kept_bytes_fall_by_the_share_of_padding(name, codec, share):
    """Nothing is kept for padding."""
    batch = padded_batch(share)
    exact_share = 1 - float(batch["attention_mask"].float().mean())
    whole, dropped = kept(name, codec, share, False), kept(name, codec, share, True)
    fixed = STATES[name] / (BATCH * LENGTH) / HIDDEN
    assert dropped == pytest.approx(whole - exact_share * (whole - fixed), rel=1e-6)


@pytest.mark.parametrize("name", BUILDS)
def test_switched_on_without_padding_it_costs_nothing(name):
    assert kept(name, "identity", 0.0, True) == kept(name, "identity", 0.0, False)
