"""Models with sparse tensors. These have no storage of their own: code must use that of their indices and values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import estimate, memory_report, patch_model
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.measurement.training_restored import resident_bytes
from tests.families import FAMILIES

FAMILY = next(family for family in FAMILIES if family.name == "vit")
BATCH = {"pixel_values": torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(5))}
BATCH["labels"] = torch.arange(16) % 2


class SparseAdapter(nn.Module):
    """A linear layer after a sparse product, as in FRoD's adapters. `made`: each forward makes the sparse matrix."""

    def __init__(self, base: nn.Linear, layout: str) -> None:
        super().__init__()
        width = base.in_features
        generator = torch.Generator().manual_seed(3)
        places = torch.randint(0, width, (2, 3 * width), generator=generator)
        values = torch.randn(3 * width, generator=generator) / 8
        matrix = torch.sparse_coo_tensor(places, values, (width, width), check_invariants=True).coalesce()
        self.base, self.layout, self.width = base, layout, width
        if layout == "made":
            self.register_buffer("places", matrix.indices())
            self.values = nn.Parameter(matrix.values())
        elif layout == "parameter":
            self.matrix: Any = nn.Parameter(matrix)
        else:
            self.register_buffer("matrix", matrix.to_sparse_csr() if layout == "csr" else matrix)

    def forward(self, x: Tensor) -> Tensor:
        size = (self.width, self.width)
        matrix = self.matrix if self.layout != "made" else torch.sparse_coo_tensor(self.places, self.values, size)
        y = torch.sparse.mm(matrix, x.reshape(-1, self.width).t()).t().reshape(x.shape)
        out: Tensor = self.base(x + torch.tanh(y))
        return out


def _model(layout: str) -> nn.Module:
    model = FAMILY.build(torch.float32)
    for name, module in list(model.named_modules()):
        if name.endswith(("q_proj", "query")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, SparseAdapter(module, layout))
    assert any(isinstance(module, SparseAdapter) for module in model.modules())
    return model.train()


def _gradients(model: Any) -> dict[str, Tensor]:
    model(**BATCH).loss.backward()
    return {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
@pytest.mark.parametrize("layout", ["made", "parameter", "coo", "csr"])
def test_gradients_are_stocks_and_the_parts_are_counted(layout: str) -> None:
    stock, patched = _gradients(_model(layout)), _model(layout)
    patch_model(patched)
    found = _gradients(patched)
    assert found.keys() == stock.keys() and all(torch.equal(found[name], stock[name]) for name in stock)

    report = memory_report(patched, BATCH)
    assert report.patched_bytes < report.stock_bytes

    optimizer = torch.optim.SGD(patched.parameters())
    sparse = [x for x in (*patched.parameters(), *patched.buffers()) if x.layout is not torch.strided]
    assert resident_bytes(patched, optimizer) > sum(x.values().nbytes for x in sparse)
    if sparse:
        with pytest.raises(ModelConfigError, match="is a sparse tensor.*memory_report"):
            estimate(patched, batch_size=16, seq_len=5)
