"""Evaluation under no_grad: MLPs in tiles, the loss and the logits of stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.memory.measurement.allocator import trace
from tests.families import BY_NAME, build, relative_error, step

HIDDEN, WIDTH, ROWS, TILE = 64, 2048, 512, 64


def _llama() -> Any:
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


@pytest.mark.parametrize("training", [False, True])
def test_mlps_in_tiles_have_the_memory_of_one(training: bool) -> None:
    """Stock has gate, its activation, up or the product at once, for all rows."""
    model = _llama().train(training)
    ids = torch.randint(0, 64, (1, ROWS), generator=torch.Generator().manual_seed(0))

    def evaluate() -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids).logits
            return logits

    stock, expected = trace(evaluate).peak_bytes, evaluate()
    patch_model(model, CompressionConfig(tiled_mlp=TILE))
    ours = trace(evaluate).peak_bytes
    torch.testing.assert_close(evaluate(), expected, rtol=1e-4, atol=1e-5)
    assert stock >= 3 * ROWS * WIDTH * 4
    assert ours <= 3 * TILE * WIDTH * 4 + 10 * ROWS * HIDDEN * 4
    short = ids[:, :TILE]
    with torch.no_grad():
        whole = model(input_ids=short).logits
        assert torch.equal(whole, _llama()(input_ids=short).logits), "one tile is the MLP itself"


def test_reentrant_checkpointing_draws_in_tiles_both_times() -> None:
    """Its first run is without gradients: LoRA's dropout there and in backward is the same."""
    peft = pytest.importorskip("peft")
    grads = []
    for reentrant in (False, True):
        model = build(BY_NAME["llama"], "fp32")
        torch.manual_seed(1)
        lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
        model = patch_model(peft.get_peft_model(model, lora), CompressionConfig(tiled_mlp=5))
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        grads.append(step(model, BY_NAME["llama"].make_batch())[1])
    assert relative_error(grads[1], grads[0]) < 1e-5
