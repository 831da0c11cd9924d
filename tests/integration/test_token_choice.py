"""Which tokens each `token_choice` chooses. The chosen tokens are those whose embeddings get gradients."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from hf_actcompress import CompressionConfig, patch_model
from tests.families import BY_NAME
from tests.integration.test_chosen_tokens import SHARE


def rows_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """bool [B, S]: the tokens whose embeddings get gradients."""
    seen: list[Tensor] = []
    embeddings = model.get_input_embeddings()  # type: ignore[operator]

    def watch(_: nn.Module, args: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(seen.append)

    hook = embeddings.register_forward_hook(watch)
    model(**batch).loss.backward()
    hook.remove()
    return seen[0].abs().amax(-1) > 0


def test_the_choices() -> None:
    family = BY_NAME["llama"]
    batch = family.make_batch("right")
    real = batch["attention_mask"].bool()
    tokens, count = real.size(1), math.ceil(SHARE * real.size(1))
    built = family.build(torch.float32)

    def found(choice: Any) -> Tensor:
        return rows_of(patch_model(copy.deepcopy(built), CompressionConfig(tokens=SHARE, token_choice=choice)), batch)

    place = torch.arange(tokens).expand_as(real)
    last = place.masked_fill(~real, -1).amax(1, keepdim=True)
    final = found("last")
    assert final.any() and not (final & ~(real & (place > last - count))).any()
    drawn = [found("random") for _ in range(4)]
    assert any(not torch.equal(drawn[0], other) for other in drawn[1:])
    assert not any((rows & ~real).any() or (rows.sum(1) > count).any() for rows in drawn)
    # the tokens with the largest losses
    with torch.no_grad():
        logits = built(**batch).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    worst = losses.masked_fill(labels == -100, -1.0).topk(count).indices
    expected = torch.zeros_like(real).scatter(1, worst, True)
    hardest = found("loss")
    assert hardest.any() and not (hardest & ~expected & real).any()


def classifier() -> nn.Module:
    sizes = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(**sizes, num_attention_heads=4))


CLASSES = {"input_ids": torch.arange(120).view(3, 40) % 60, "labels": torch.tensor([0, 1, 0])}


def test_what_a_classifier_reads_is_always_chosen() -> None:
    rows = rows_of(patch_model(classifier(), CompressionConfig(tokens=0.1, token_choice="last")), CLASSES)
    assert rows[:, 0].all() and rows[:, -1].all() and (rows.sum(1) == 4).all()
