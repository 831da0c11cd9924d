"""A small training on a CPU, with dropout and running statistics, that can run out of memory."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

WIDTH, LENGTH = 32, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.up, self.drop, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.frozen
        x = x + self.down(self.drop(nn.functional.gelu(self.up(x))))
        return self.norm(x.transpose(1, 2)).square().mean()


def make_batch(batch_size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(50, (batch_size, LENGTH))}


def training(seed: int = 0, fits: int | None = None):
    """A model, an optimizer, and a step that runs out of memory halfway if the batch has more than `fits` rows."""
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch):
        loss = model(**batch)
        random.random(), numpy.random.rand()
        loss.backward()
        if fits is not None and len(batch["input_ids"]) > fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand so on")
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step
