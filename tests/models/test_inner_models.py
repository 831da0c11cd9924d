"""Inner models that are called directly, several models in one module, and parts that are replaced after patching."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from hf_actcompress import kept_bytes, memory_report, patch_model, patch_report, unpatch_model
from hf_actcompress.modules.base import settings_of
from hf_actcompress.modules.head import HeadMixin
from hf_actcompress.records import in_frame, live_entries
from tests.families import BODY, BY_NAME, differing, step

CPU = torch.device("cpu")
LLAMA, BERT = BY_NAME["llama"], BY_NAME["bert"]
pytestmark = pytest.mark.filterwarnings("ignore")


class Towers(nn.Module):
    """Two encoders in one module that is not a transformers model, as for retrieval and for CLIP-like losses."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.query, self.passage = BERT.build(dtype, seed=1).bert, BERT.build(dtype, seed=2).bert

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        q, p = (tower(**inputs).last_hidden_state.mean(1) for tower in (self.query, self.passage))
        return (q @ p.T).float().log_softmax(-1).diagonal().mean()


def lora(model: nn.Module, name: str = "default") -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, adapter_name=name)


def decoder_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Like TRL's fused loss, it calls the decoder below the head, and multiplies by the head's weight itself."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = base.model(input_ids=batch["input_ids"]).last_hidden_state
    return (hidden[:, -1] @ base.lm_head.weight.t()).float().logsumexp(-1).mean()


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def kept(model: Any, batch: dict[str, Tensor]) -> int:
    return kept_bytes(lambda: decoder_loss(model, batch), CPU)


def test_two_models_in_one_module() -> None:
    stock, batch = Towers(torch.bfloat16).train(), BERT.make_batch("right")
    ours = patch_model(copy.deepcopy(stock))
    assert not differing(gradients(ours, ours(batch)), gradients(stock, stock(batch)))
    assert kept_bytes(lambda: ours(batch), CPU) < 0.7 * kept_bytes(lambda: stock(batch), CPU)
    types = [type(m) for m in unpatch_model(ours).modules()]
    assert types == [type(m) for m in stock.modules()] and "forward" not in ours.passage.__dict__


def test_heads_and_adapters_of_two_models() -> None:
    """Each of them has a head that defers its logits, and adapters that come after patching."""
    both = nn.ModuleList([LLAMA.build(seed=1), LLAMA.build(seed=2)])
    patch_model(both)
    assert [isinstance(model.lm_head, HeadMixin) for model in both] == [True, True]
    for index in range(2):
        lora(both[index])
        step(both[index], LLAMA.make_batch())
    adapters = [m for m in both.modules() if type(m).__name__.endswith("Linear") and hasattr(m, "lora_A")]
    assert adapters and all(settings_of(m) is not None for m in adapters)


def test_a_decoder_called_past_its_head_after_adapters_came() -> None:
    batch = LLAMA.make_batch()
    stock = lora(LLAMA.build(torch.bfloat16))
    ours = lora(patch_model(LLAMA.build(torch.bfloat16)))
    assert not differing(gradients(ours, decoder_loss(ours, batch)), gradients(stock, decoder_loss(stock, batch)))
    assert not in_frame() and live_entries() == 0
    assert kept(ours, batch) <= 0.45 * kept(stock, batch)


def test_adapters_added_again_under_the_same_name() -> None:
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    batch = LLAMA.make_batch()
    model = get_peft_model(patch_model(LLAMA.build()), config)
    step(model, batch)
    base = model.unload()
    model = get_peft_model(base, config)
    step(model, batch)
    adapters = [m for m in model.modules() if hasattr(m, "lora_A")]
    assert adapters and all(settings_of(m) is not None for m in adapters)
    assert all(settings_of(m.lora_A["default"]) is not None for m in adapters)


def test_a_resized_and_an_assigned_head() -> None:
    batch = LLAMA.make_batch()
    model = patch_model(LLAMA.build(tie_word_embeddings=False))
    for exchange in ("resize", "assign"):
        if exchange == "resize":
            model.resize_token_embeddings(80, mean_resizing=False)
        else:
            model.lm_head = nn.Linear(32, 80, bias=False)
        row = next(row for row in patch_report(model).rows if row.name == "lm_head")
        assert bool(row.reason) == (settings_of(model.lm_head) is None)
        loss, grads = step(model, batch)
        assert isinstance(model.lm_head, HeadMixin)
        (row,) = (row for row in patch_report(model).rows if row.name == "lm_head")
        assert row.role == "loss_head" and not row.reason
        stock = unpatch_model(copy.deepcopy(model))
        expected_loss, expected = step(stock, batch)
        torch.testing.assert_close(loss, expected_loss)
        assert grads.keys() == expected.keys()


def test_the_last_norm_of_an_inner_model_goes_to_the_head() -> None:
    """An inner frame that cleared the registry would leave the head to keep the norm's output itself."""
    model = patch_model(LLAMA.build(torch.bfloat16), BODY)
    rows = {row.module: row for row in memory_report(model, LLAMA.make_batch()).rows}
    assert rows.get("lm_head") is None or rows["lm_head"].patched_bytes < 2 * 32 * 13


def test_a_copy_of_an_inner_model_stands_alone() -> None:
    model = patch_model(LLAMA.build(), BODY)
    inner = copy.deepcopy(model.model)
    ids = LLAMA.make_batch()["input_ids"]
    expected = gradients(model.model, model.model(input_ids=ids).last_hidden_state.sin().sum())
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert not differing(gradients(inner, inner(input_ids=ids).last_hidden_state.sin().sum()), expected)
