"""Estimates for one process of several, against the allocator's events of a model that FSDP2 has sharded.

Both sides use torch's fake process group. The measured model has real tensors, but its collectives transfer nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_actcompress import estimate, kept_bytes, measure_step, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.estimation.fake_step.sharding import process_group
from hf_actcompress.models.adapters import with_lora
from hf_actcompress.models.checkpointing import checkpointable
from tests.slopes import bert, gpt2, llama

RANKS, ROWS, TOKENS = 4, 2, 64
LLAMA = partial(llama, hidden=128, pad_token_id=0)


def truth(
    model: Any, preset: str | None, mixed: torch.dtype | None = None, lora: int | None = None
) -> tuple[int, int, int]:
    """Kept bytes, the peak of a step, and the bytes of a rank's weights."""
    if lora is not None:
        model = with_lora(model, lora)
    if preset is not None:
        patch_model(model, preset)
    policy = MixedPrecisionPolicy(param_dtype=mixed, reduce_dtype=mixed)
    ids = torch.randint(3, 90, (ROWS, TOKENS))
    with process_group(RANKS) as mesh:
        modules = dict(model.named_modules())
        for name in checkpointable(model):
            fully_shard(modules[name], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        model.train()
        step()
        step()
        peak = measure_step(step, "cpu").peak_bytes
        weights = sum(p.to_local().nbytes for p in model.parameters())
        # this comes last, because a forward without a backward leaves gathered weights behind
        kept = kept_bytes(lambda: model(input_ids=ids, labels=ids), "cpu")
        return kept, peak, weights


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "stock": (partial(LLAMA, 3), {"config": None}),
    "tiles": (partial(LLAMA, 3), {"config": "long"}),
    "tiles, checkpointed": (partial(LLAMA, 6), {"config": "long", "gradient_checkpointing": True}),
    "exact, many layers": (partial(LLAMA, 9), {}),
    "a large vocabulary": (partial(LLAMA, 3, vocab_size=8000), {}),
    "checkpointing": (partial(LLAMA, 6), {"gradient_checkpointing": True}),
    "mixed precision": (partial(LLAMA, 5), {"autocast": torch.bfloat16}),
    "int8": (partial(LLAMA, 3), {"config": "int8"}),
    "lora": (partial(LLAMA, 5), {"lora": 4}),
    "bert": (partial(bert, 4, hidden=128), {}),
    "gpt2, tied": (partial(gpt2, 4, hidden=128, bos_token_id=0, eos_token_id=0), {}),
}


@pytest.mark.daily(4)
@pytest.mark.parametrize("name", CASES)
def test_one_process_of_several(name: str) -> None:
    build, options = CASES[name]
    options = {"config": "exact", **options}
    model = build()
    if options.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable()
    kept, peak, weights = truth(model, options["config"], options.get("autocast"), options.get("lora"))
    found = estimate(build(), batch_size=ROWS, seq_len=TOKENS, device="cpu", fsdp=RANKS, **options)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)
    assert weights <= found.weights_bytes <= 1.05 * weights
    assert not dist.is_initialized()


def test_more_processes_need_less_of_each() -> None:
    sizes = [estimate(LLAMA(3), batch_size=2, seq_len=64, device="cpu", fsdp=n).total_peak_bytes for n in (1, 2, 8)]
    assert sizes == sorted(sizes, reverse=True)


def test_what_cannot_be_is_said() -> None:
    with process_group(2), pytest.raises(ModelConfigError, match="in a process of its own"):
        estimate(LLAMA(2), batch_size=1, seq_len=8, fsdp=2)
    with pytest.raises(ModelConfigError, match="fsdp"):
        estimate(LLAMA(2), batch_size=1, seq_len=8, fsdp=0)
    with pytest.raises(ModelConfigError, match="compile"):
        estimate(LLAMA(2), batch_size=1, seq_len=8, fsdp=2, engine="compile")
    with pytest.raises(ModelConfigError, match="quantised"):
        estimate(LLAMA(2).config, batch_size=1, seq_len=8, fsdp=2, quantization="nf4", lora=4)
