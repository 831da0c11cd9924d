"""Losses that training code computes from a model's logits, outside of its forward (RL, preference training)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother

# it computes the terms of a loss from the logits [B, S, V] and the ids [B, S]
Loss = Callable[[Tensor, Tensor], list[Tensor]]
LAST = 20


def completion(logits: Tensor, temperature: float = 0.7) -> Tensor:
    """The logits of the last tokens, scaled."""
    logits = logits[:, :-1, :]
    return logits[:, -LAST:, :] / temperature


def token_log_probs(logits: Tensor, index: Tensor) -> Tensor:
    """TRL's `selective_log_softmax`."""
    if logits.dtype in (torch.float32, torch.float64):
        selected = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = [
        F.log_softmax(row, dim=-1).gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)
        for row, labels in zip(logits, index, strict=True)
    ]
    return torch.stack(rows)


def token_entropies(logits: Tensor) -> Tensor:
    """TRL's `entropy_from_logits`."""
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(16, dim=0):
        log_probs = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(log_probs) * log_probs).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def grpo(logits: Tensor, ids: Tensor) -> list[Tensor]:
    return [token_log_probs(completion(logits), ids[:, -LAST:])]


def grpo_with_entropy(logits: Tensor, ids: Tensor) -> list[Tensor]:
    scaled = completion(logits)
    return [token_log_probs(scaled, ids[:, -LAST:]), token_entropies(scaled)]


def ppo(logits: Tensor, ids: Tensor) -> list[Tensor]:
    """It scales the logits in place, and computes the entropy from the softmax."""
    logits /= 0.7 + 1e-7
    logits = logits[:, :-1]
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = torch.gather(log_probs, 2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    probabilities = F.softmax(logits, dim=-1)
    return [chosen, torch.logsumexp(logits, dim=-1) - torch.sum(probabilities * logits, dim=-1)]


def dpo(logits: Tensor, ids: Tensor) -> list[Tensor]:
    """One batch holds the chosen and the rejected sequences. Labels that are multiples of 3 stand for padding."""
    labels = ids[:, 1:].clone()
    mask = labels % 3 > 0
    per_token = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    chosen, rejected = (per_token * mask).sum(-1).chunk(2)
    return [F.logsigmoid(0.1 * (chosen - rejected))]


def kto(logits: Tensor, ids: Tensor) -> list[Tensor]:
    labels = ids[:, 1:].clone()
    per_token = token_log_probs(logits[:, :-1, :], labels)
    sums = (per_token * (labels % 3 > 0)).sum(-1)
    return [1 - torch.sigmoid(0.1 * sums[::2]), 1 - torch.sigmoid(-0.1 * sums[1::2])]


def own_cross_entropy(logits: Tensor, ids: Tensor) -> list[Tensor]:
    labels = torch.where(ids % 5 == 0, -100, ids)[:, 1:]
    return [F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels.flatten())]


def smoothed_cross_entropy(logits: Tensor, ids: Tensor) -> list[Tensor]:
    labels = torch.where(ids % 5 == 0, -100, ids)
    return [F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), label_smoothing=0.1)]


def label_smoother(logits: Tensor, ids: Tensor) -> list[Tensor]:
    """The label smoother of the Trainer."""
    labels = torch.where(ids % 5 == 0, -100, ids)
    outputs = SimpleNamespace(logits=logits)
    smoother = LabelSmoother(epsilon=0.1)
    return [smoother({"logits": outputs.logits}, labels, shift_labels=True)]


LOSSES: dict[str, Loss] = {
    "grpo": grpo,
    "grpo with entropy": grpo_with_entropy,
    "ppo": ppo,
    "dpo": dpo,
    "kto": kto,
    "own cross entropy": own_cross_entropy,
    "smoothed cross entropy": smoothed_cross_entropy,
    "label smoother": label_smoother,
}


def total(values: list[Tensor]) -> Tensor:
    """A weighted sum of all values, in which each token of a tensor has a different weight."""
    sums = []
    for value in values:
        weights = torch.linspace(0.3, 1.7, value.numel(), dtype=value.dtype).view(value.shape)
        sums.append((value * weights).sum() / max(value.numel(), 1))
    return torch.stack(sums).sum()
