"""Norms, sums and pooling of feature maps: which of their outputs are kept, and which are recomputed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import kept_bytes, patch_model
from tests.models.test_convolutions import batch, resnet
from tests.oracle import assert_equal_bits


class ChannelsFirstNorm(nn.LayerNorm):
    """ConvNeXt's norm: it returns a permuted view."""

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ResponseNorm(nn.Module):
    """ConvNeXt V2's: a norm over pixels, and weights [1, 1, 1, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 1, 1, width))
        self.bias = nn.Parameter(torch.randn(1, 1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, ord=2, dim=(1, 2), keepdim=True)
        return self.weight * (x * (norm / (norm.mean(-1, keepdim=True) + 1e-6))) + self.bias + x


class Around(nn.Module):
    """A block with one norm between two layers, of which the second keeps the norm's output in stock."""

    def __init__(self, norm: nn.Module, before: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.norm, self.after = before, norm, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.before(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["channels first", "response"])
def test_norms_of_maps_run_again(name: str) -> None:
    torch.manual_seed(0)
    if name == "response":
        model = Around(ResponseNorm(16), nn.Linear(4, 16), nn.Linear(16, 3))
        inputs, output = torch.randn(3, 5, 7, 4), 3 * 5 * 7 * 16 * 4
    else:
        model = Around(ChannelsFirstNorm(16), nn.Conv2d(4, 16, 3), nn.Conv2d(16, 3, 3))
        inputs, output = torch.randn(3, 4, 7, 9), 3 * 5 * 7 * 16 * 4
    patched = patch_model(copy.deepcopy(model), strict=False)
    saved = kept_bytes(lambda: model(inputs).sum(), "cpu") - kept_bytes(lambda: patched(inputs).sum(), "cpu")
    assert saved >= output
    for _ in range(2):
        for each in (model, patched):
            each.zero_grad()
            each(inputs).square().sum().backward()
        for theirs, ours in zip(model.parameters(), patched.parameters(), strict=True):
            assert_equal_bits(ours.grad, theirs.grad)


def test_sums_are_not_kept() -> None:
    """A ResNet keeps the inputs of its BatchNorms, its max-pooled map with indices of two bytes, and little else."""
    model, inputs = resnet("bottleneck", 3), batch()
    patched = patch_model(copy.deepcopy(model), strict=False)
    normed: list[int] = []
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.register_forward_hook(lambda module, args, out: normed.append(args[0].nbytes))
    pooled: list[int] = []
    model.resnet.embedder.pooler.register_forward_hook(lambda module, args, out: pooled.append(out.numel() * (4 + 2)))
    model(**inputs)
    statistics = sum(2 * m.num_features * 4 for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    kept = kept_bytes(lambda: patched(**inputs).loss, "cpu")
    assert kept <= (sum(normed) + sum(pooled) + statistics) * 1.02
