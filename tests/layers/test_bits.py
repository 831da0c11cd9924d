"""Layers by plans have stock's bits in every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.families import BY_NAME, FAMILIES
from tests.layers.plans import assert_stock_bits, plans_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "autocast": torch.float32}
# (mode, dropout, padding, checkpointing)
WAYS = [
    ("fp32", 0.0, "none", False), ("bf16", 0.0, "none", False), ("autocast", 0.0, "none", False),
    ("fp32", 0.1, "none", False), ("autocast", 0.1, "right", False), ("fp32", 0.0, "left", False),
    ("bf16", 0.1, "none", True), ("autocast", 0.0, "right", True),
]  # fmt: skip


@pytest.mark.daily(24)
@pytest.mark.parametrize(("mode", "dropout", "padding", "checkpointed"), WAYS)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_every_family(name: str, mode: str, dropout: float, padding: str, checkpointed: bool) -> None:
    family = BY_NAME[name]
    padding = padding if padding in family.paddings else "none"
    model = family.build(DTYPES[mode], dropout=dropout)
    if checkpointed:
        model.gradient_checkpointing_enable()
    assert_stock_bits(model, family.make_batch(padding), mode)


@pytest.mark.daily(6)
@pytest.mark.parametrize(
    "options", [{}, {"lora_dropout": 0.1}, {"use_rslora": True}, {"use_dora": True, "lora_dropout": 0.1}], ids=str
)
@pytest.mark.parametrize("mode", DTYPES)
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2-gelu-tanh", "t5"])
def test_adapters(name: str, mode: str, options: dict[str, Any]) -> None:
    base = BY_NAME[name].build(DTYPES[mode])
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    assert_stock_bits(get_peft_model(base, config).train(), BY_NAME[name].make_batch(), mode)


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2-gelu-new"])
def test_any_length_by_one_graph(name: str) -> None:
    """From the second sizes on a graph serves any sizes."""
    family, model = BY_NAME[name], BY_NAME[name].build()
    ours = assert_stock_bits(model, family.make_batch())
    for batch, length in ((2, 7), (3, 9), (4, 20), (5, 11)):
        ids = torch.randint(3, 60, (batch, length), generator=torch.Generator().manual_seed(length))
        for stock in (model(input_ids=ids, labels=ids).loss,):
            stock.backward()
        found = ours(input_ids=ids, labels=ids).loss
        found.backward()
        assert torch.equal(stock, found)
        grads = dict(ours.named_parameters())
        assert not [n for n, p in model.named_parameters() if not torch.equal(p.grad, grads[n].grad)]
        model.zero_grad(), ours.zero_grad()
    assert len(plans_of(ours)[0].known()) == 2
