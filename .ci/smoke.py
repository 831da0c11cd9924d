"""Trains one step of a tiny model with the package that is installed beside this Python, and compares it with stock."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_actcompress
from hf_actcompress import kept_bytes, patch_model

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    installed = Path(hf_actcompress.__file__)
    assert installed.is_relative_to(sys.prefix), f"{installed} is not of the environment {sys.prefix}"
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, vocab_size=128, architectures=["LlamaForCausalLM"], **SIZES)
    # for `hf-actcompress estimate`
    config.save_pretrained(".")
    stock = LlamaForCausalLM(config).train()
    patched = patch_model(copy.deepcopy(stock))
    ids = torch.randint(128, (2, 64))
    kept = [kept_bytes(lambda m=model: m(input_ids=ids, labels=ids), "cpu") for model in (stock, patched)]
    assert kept[1] < kept[0], kept
    for model in (stock, patched):
        model(input_ids=ids, labels=ids).loss.backward()
    for (name, wanted), found in zip(stock.named_parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=lambda text, name=name: f"{name}: {text}")
    before = patched.lm_head.weight.detach().clone()
    torch.optim.AdamW(patched.parameters()).step()
    assert not torch.equal(before, patched.lm_head.weight)
    print(f"{installed.parent}: one step; {kept[1]} bytes are kept, {kept[0]} by stock")


main()
