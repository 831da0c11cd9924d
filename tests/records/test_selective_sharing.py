"""Modules that leave keys for a later layer: a second run must not replace these keys by its own."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import MutableMapping
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model, patch_report
from tests.oracle import assert_equal_bits
from tests.records.test_selective import LENGTH, WIDTH, Attention


class Shelf:
    """A container of a type that our code does not know."""

    def __init__(self) -> None:
        self.content: dict[str, Tensor] = {}

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.content[key] = value

    def __getitem__(self, key: str) -> Tensor:
        return self.content[key]


class Sharing(Attention):
    """Computes keys and leaves them for the next layer, or reads those of the layer before."""

    reads = False
    left: Tensor | None = None

    def forward(self, x: Tensor, mask: Any = None, *, others: Any = None, given: Tensor | None = None) -> Any:
        q, v = self.heads(self.q(x)), self.heads(self.v(x))
        k = given if given is not None else others["keys"] if self.reads else self.heads(self.k(x))
        probs = (q @ k.transpose(-1, -2) * 8**-0.5).softmax(-1)
        if others is None:
            self.left = k
        elif not self.reads:
            others["keys"] = k
        return self.out((probs @ v).transpose(1, 2).reshape(x.shape))


class Two(nn.Module):
    def __init__(self, kind: type[Any] | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.kind = Sharing(), Sharing(), kind
        self.second.reads = True

    def forward(self, x: Tensor) -> Tensor:
        shared = None if self.kind is None else self.kind()
        y: Tensor = self.first(x, others=shared)
        y = self.second(y, others=shared, given=self.first.left)
        return y.square().sum()


def steps(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """Gradients of two steps. The first step tries whether a module may run again."""
    found = []
    for _ in range(2):
        model.zero_grad()
        model(batch).backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("kind", [dict, UserDict, Shelf, None])
def test_keys_that_a_later_layer_reads(kind: type[MutableMapping[str, Tensor]] | None) -> None:
    """The keys are in a dict, a UserDict as in transformers, an unknown container, or an attribute of the module."""
    stock = Two(kind).train()
    x = torch.randn(2, LENGTH, WIDTH)
    ours = patch_model(copy.deepcopy(stock))
    assert_equal_bits(steps(ours, x), steps(stock, x))
    assert sum(row.role == "selective" for row in patch_report(ours).patched) == 2


def test_gemma3n_with_eager_attention() -> None:
    """Its last layers read keys and values of the layers before."""
    config = hf.Gemma3nTextConfig(
        vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, hidden_size_per_layer_input=8, head_dim=8,
        intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        num_kv_shared_layers=2, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2, attn_implementation="eager", pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    stock: Any = hf.Gemma3nForCausalLM(config).train()
    ids = torch.arange(2 * 40).view(2, 40) % 60 + 3
    off, ours = (patch_model(copy.deepcopy(stock), CompressionConfig(selective=on)) for on in (False, True))
    found = []
    for model in (off, ours):
        model(input_ids=ids).logits.square().mean().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert_equal_bits(*found)
