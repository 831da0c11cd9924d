"""Estimates with the loss of TRL's trainers, compared with the allocator's events of TRL's own head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from hf_actcompress import estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.models.adapters import with_lora
from tests.slopes import bert, llama

ROWS, TOKENS = 2, 64
# a small vocabulary: without Triton, TRL copies its tiles, which are as wide as the vocabulary; on a GPU it does not
LLAMA = partial(llama, 3, hidden=256, vocab_size=128, pad_token_id=0)


@pytest.mark.parametrize(
    ("config", "lora"), [(None, None), ("exact", None), ("long", None), ("int8", 4)], ids=str
)  # fmt: skip
def test_the_head_of_trl(config: str | None, lora: int | None) -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    model: Any = LLAMA()
    found = estimate(model, batch_size=ROWS, seq_len=TOKENS, config=config, lora=lora, device="cpu", trl=True)
    if lora is not None:
        model = with_lora(model, lora)
    if config is not None:
        patch_model(model, config)
    base = model.get_base_model() if lora is not None else model
    utils.add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    ids = torch.randint(3, 90, (ROWS, TOKENS))

    def forward() -> Any:
        return model.train()(input_ids=ids, labels=ids, fused_lm_head=True)

    kept = kept_bytes(forward, "cpu")
    forward().loss.backward()
    peak = measure_step(lambda: forward().loss.backward(), "cpu").peak_bytes
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


def test_logits_are_not_there_to_be_saved() -> None:
    vocabulary, sizes = 2000, {"batch_size": ROWS, "seq_len": TOKENS}
    model = LLAMA(vocab_size=vocabulary)
    plain, found = (estimate(model, config=None, trl=trl, **sizes) for trl in (False, True))
    assert found.kept_bytes < plain.kept_bytes - ROWS * (TOKENS - 1) * vocabulary * 4
    found, without = (estimate(model, config=config, trl=True, **sizes) for config in ("long", "exact"))
    assert found.kept_by_role["loss"] == without.kept_by_role["loss"]


def test_what_has_no_such_head_is_said() -> None:
    with pytest.raises(ModelConfigError, match="causal"):
        estimate(bert(2, hidden=64), batch_size=1, seq_len=8, trl=True)
    with pytest.raises(ModelConfigError, match="eager"):
        estimate(LLAMA(), batch_size=1, seq_len=8, trl=True, engine="compile")
