"""Bytes of eager attention and of scans, per token and layer in units of the hidden size, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf

from hf_actcompress import estimate, kept_bytes, patch_model
from tests.slopes import VOCAB, bert, llama, slope

pytestmark = pytest.mark.daily(2)


def mamba2(layers: int, hidden: int = 512) -> Any:
    config = hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=hidden, num_hidden_layers=layers, num_heads=hidden // 32, head_dim=64,
        state_size=64, n_groups=1, chunk_size=64, use_cache=False,
    )  # fmt: skip
    return hf.Mamba2ForCausalLM(config)


eager_bert, eager_llama = (partial(build, attn_implementation="eager") for build in (bert, llama))
# stock keeps the probabilities, so its figure grows with the length, here 512 tokens. `exact` keeps what sdpa keeps
LIMITS = {"bert": (eager_bert, 50, 20.5, 11.5), "llama": (eager_llama, 95, 23.5, 12.5), "mamba2": (mamba2, 160, 15, 8)}


@pytest.mark.parametrize("name", LIMITS)
def test_kept(name: str) -> None:
    build, stock, exact, int8 = LIMITS[name]
    length = 256 if name == "mamba2" else 512
    kept = {p: slope(build, prepare=lambda m, p=p: patch_model(m, p), length=length).kept for p in ("exact", "int8")}
    kept["stock"] = slope(build, length=length).kept
    print(name, kept)
    assert kept["stock"] >= stock and kept["exact"] <= exact and kept["int8"] <= int8


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("build", [partial(bert, 2, 64), partial(mamba2, 2, 64)], ids=["bert", "mamba2"])
def test_an_estimate_sees_it(build: Callable[..., Any], dropout: float) -> None:
    """With dropout, each call also keeps a generator's state; on a CPU it is large enough to matter."""
    model = build() if build.func is mamba2 else build(attn_implementation="eager", hidden_dropout_prob=dropout)  # type: ignore[attr-defined]
    if build.func is not mamba2:  # type: ignore[attr-defined]
        for module in model.modules():
            if hasattr(module, "self"):
                module.self.dropout.p = dropout
    ids = torch.randint(3, VOCAB, (2, 128))
    predicted = estimate(model, batch_size=2, seq_len=128, device="cpu").kept_bytes
    ours = patch_model(model)
    ours(ids, labels=ids)
    measured = kept_bytes(lambda: ours(input_ids=ids, labels=ids).loss, "cpu")
    assert abs(predicted - measured) <= 0.01 * measured
