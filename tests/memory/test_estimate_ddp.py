"""Estimates for one process under DistributedDataParallel, compared with what that allocates."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from hf_actcompress import measure_step
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import estimate
from hf_actcompress.memory.estimation.estimates import Estimates

CONFIG = hf.BertConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, vocab_size=97)


def test_buckets_are_a_second_copy_of_the_gradients(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "device": "cpu"}
    alone, one_of_two = (estimate(CONFIG, **sizes, processes=n) for n in (1, 2))
    added = one_of_two.gradients_bytes - alone.gradients_bytes
    model, held = hf.BertForMaskedLM(CONFIG), list[nn.Module]()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        # without the first broadcast: it copies the weights once, and gloo's thread frees that copy when it likes
        wrapped = partial(DistributedDataParallel, model, init_sync=False)
        made = measure_step(lambda: held.append(wrapped()), "cpu").left_bytes
    finally:
        held.clear()
        distributed.destroy_process_group()
    assert added == alone.gradients_bytes == pytest.approx(made, rel=0.02)
    assert one_of_two.device_bytes - alone.device_bytes == added
    assert one_of_two.weights_bytes == alone.weights_bytes and one_of_two.optimizer_bytes == alone.optimizer_bytes
    assert any("gradient_as_bucket_view" in note for note in one_of_two.notes) and not alone.notes


def test_adapters_are_all_that_is_in_buckets() -> None:
    found = [Estimates(CONFIG, dtype=torch.bfloat16, lora=4, processes=n).estimate(2, 16, "exact") for n in (1, 2)]
    assert found[1].device_bytes - found[0].device_bytes == found[0].gradients_bytes < found[0].weights_bytes / 4


@pytest.mark.parametrize("options", [{"processes": 0}, {"processes": 2, "fsdp": 2}])
def test_what_cannot_be_is_said(options: dict[str, int]) -> None:
    with pytest.raises(ModelConfigError, match="processes is a number"):
        Estimates(CONFIG, **options)  # type: ignore[arg-type]
