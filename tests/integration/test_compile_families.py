"""torch.compile of 14 types of models: one graph for padded and packed batches and for adapters, with labels."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import patch_model
from tests.families import step
from tests.integration.compiling import kept_by, one_graph, same_step
from tests.sweep.batches import find_batch, padded, with_labels
from tests.sweep.catalogue import catalogue, model_class
from tests.sweep.configs import tiny_config

pytestmark = pytest.mark.daily(16)

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "olmo2", "gpt2", "gpt_neox", "bert", "roberta",
    "modernbert", "vit", "t5",
)  # fmt: skip
CLASSES = ("CausalLM", "MaskedLM", "LMHeadModel", "ImageClassification", "ConditionalGeneration")
PAIRS = {pair.type: pair for pair in catalogue() if pair.type in TYPES and pair.model.endswith(CLASSES)}
# the other types do not recognise packed sequences by their positions
PACKED = TYPES[: TYPES.index("bert")]
CASES = [
    *((name, "padded") for name in TYPES), *((name, "packed") for name in PACKED), *((name, "lora") for name in TYPES),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "how"), CASES)
def test_one_graph(name: str, how: str) -> None:
    """No break, stock's bits, and fewer bytes than the stock graph keeps."""
    pair = PAIRS[name]
    torch.manual_seed(0)
    stock: Any = model_class(pair)(tiny_config(name)).train()
    if getattr(stock, "loss_type", None) is None:
        stock.loss_type = "ForCausalLM"
    batch = _batch(stock, name, how)
    if how == "lora":
        stock = _adapted(stock)
    ours = patch_model(copy.deepcopy(stock))
    try:
        expected = step(one_graph(stock, "aot_eager"), batch)
    except torch._dynamo.exc.Unsupported as error:
        pytest.skip(f"the stock model has no graph here: {str(error).splitlines()[0]}")
    rms_norms = any("RMSNorm" in type(m).__name__ or name == "t5" for m in stock.modules())
    same_step(step(one_graph(ours), batch), expected, rms_norms=rms_norms, limit=1e-5 if how == "lora" else 1e-6)
    assert kept_by(one_graph(ours), batch) < 0.9 * kept_by(one_graph(stock, "aot_eager"), batch)


def _batch(model: Any, name: str, how: str) -> dict[str, Tensor]:
    task = PAIRS[name].task
    batch = with_labels(model, find_batch(model, name, task), task)
    if how == "packed":
        assert "position_ids" in inspect.signature(model.forward).parameters
        length = batch["input_ids"].shape[1]
        positions = torch.tensor([*range(length // 3), *range(length - length // 3)])
        batch = {**batch, "position_ids": positions.expand_as(batch["input_ids"]), "attention_mask": None}
    else:
        batch = padded(batch, "right", model.config) or batch
    return {key: value for key, value in batch.items() if isinstance(value, Tensor)}


def _adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1))
