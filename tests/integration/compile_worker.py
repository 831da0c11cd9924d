"""Compile a small model with Inductor in a process of its own; print what it keeps and how often caches hit."""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor, nn
from transformers.activations import GELUActivation

from hf_actcompress import kept_bytes, patch_model


class Block(nn.Module):
    """A norm and an MLP with dropout. Its matmuls read the results of the norm and of the activation."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.act, self.dropout = nn.LayerNorm(width), GELUActivation(), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.dropout(self.down(self.act(self.up(self.norm(x)))))).square().mean()


def main(preset: str) -> None:
    torch.manual_seed(0)
    model, x = Block().bfloat16(), torch.randn(128, 64).bfloat16()
    if preset != "stock":
        patch_model(model, preset)
    compiled = torch.compile(model, fullgraph=True)
    compiled(x).backward()
    counters = torch._dynamo.utils.counters["aot_autograd"]
    found = {"kept": kept_bytes(lambda: compiled(x), "cpu"), "eager": kept_bytes(lambda: model(x), "cpu")}
    print(json.dumps({**found, "hits": counters["autograd_cache_hit"], "misses": counters["autograd_cache_miss"]}))


if __name__ == "__main__":
    main(sys.argv[1])
