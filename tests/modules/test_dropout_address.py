"""A GPU draws dropout masks in vectors whose width depends on the address, so a replay needs the same alignment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import patch_model
from hf_actcompress.modules import leaves
from hf_actcompress.reference import draws_like_any


def test_only_the_address_on_a_device_counts() -> None:
    def at(device: str, address: int) -> Any:
        return SimpleNamespace(device=torch.device(device), data_ptr=lambda: address)

    assert draws_like_any(at("cpu", 8)) and draws_like_any(at("cuda", 512)) and not draws_like_any(at("cuda", 520))


def test_stock_runs_where_the_input_is_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = patch_model(nn.Sequential(nn.Dropout(0.5)))[0]
    x = torch.ones(4, requires_grad=True)
    assert "DropoutFunction" in type(dropout(x).grad_fn).__name__
    monkeypatch.setattr(leaves, "draws_like_any", lambda x: False)
    assert "DropoutFunction" not in type(dropout(x).grad_fn).__name__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_and_inputs_at_any_address(dtype: torch.dtype) -> None:
    """x has two halves of an odd number of elements, so the second half and its gradient are not aligned."""
    gradients = []
    for dropout in (nn.Dropout(0.3), patch_model(nn.Sequential(nn.Dropout(0.3)))[0]):
        torch.manual_seed(0)
        x = torch.randn(2 * 4099, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)
        x.requires_grad_()
        aligned = torch.cat([x[:4099], dropout(x[:4099] * 1)])
        shifted = torch.cat([x[4099:], dropout(x[4099:])])
        (aligned * shifted).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
