"""A sum of embeddings is not kept: backward takes the rows again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_actcompress import ops, patch_model
from hf_actcompress.records import Derived, frame, record_of
from hf_actcompress.records.saving import Leaves, slot_of
from tests.families import BODY, BY_NAME, differing, step
from tests.oracle import kept_bytes

IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PLACES = torch.arange(4)[None]


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places, self.kinds = nn.Embedding(11, 16, 0), nn.Embedding(4, 16), nn.Embedding(2, 16)


SUMS: dict[str, Any] = {
    "tokens": lambda m: m.tokens(IDS),
    "two": lambda m: m.tokens(IDS) + m.places(PLACES),
    "three": lambda m: m.tokens(IDS) + m.kinds(IDS % 2) + m.places(PLACES),
    "other order": lambda m: m.places(PLACES) + (m.kinds(IDS % 2) + m.tokens(IDS)),
    "rows": lambda m: m.tokens(IDS) + m.places.weight[PLACES],
}
OTHERS: dict[str, Any] = {
    "in place": lambda m: m.tokens(IDS).add_(1),
    "scaled": lambda m: torch.add(m.tokens(IDS), m.places(PLACES), alpha=2),
    "constant": lambda m: m.tokens(IDS) + torch.ones(16),
    "product": lambda m: m.tokens(IDS) + m.tokens(IDS) @ torch.ones(16, 16),
    "made weight": lambda m: nn.functional.embedding(IDS, m.tokens.weight * 2),
    "frozen": lambda m: m.tokens(IDS) + m.places(PLACES).detach(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SUMS)
def test_sums_are_made_again(name: str, dtype: torch.dtype) -> None:
    model = _Embeddings().to(dtype)
    with frame():
        x = SUMS[name](model)
        record, leaves = record_of(x), Leaves()
        assert isinstance(record, Derived) and record_of(x) is record
        slot = slot_of(record, leaves)
        known = {p.untyped_storage()._cdata for p in model.parameters()}
        assert all(t.untyped_storage()._cdata in known or not t.is_floating_point() for t in leaves.tensors)
        assert torch.equal(slot.value(tuple(leaves.tensors)), x)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_sum_is_kept(name: str) -> None:
    with frame():
        assert not isinstance(record_of(OTHERS[name](_Embeddings())), Derived)


def _step(model: _Embeddings, norm: Any, checkpointed: bool) -> list[Tensor]:
    weight, bias = torch.linspace(0.5, 2, 16).requires_grad_(), torch.ones(16, requires_grad=True)

    def forward() -> Tensor:
        with frame():
            y: Tensor = norm(SUMS["three"](model), (16,), weight, bias)
            return y * y

    y = checkpoint(forward, use_reentrant=False) if checkpointed else forward()
    wanted = [weight, bias, *model.parameters()]
    return [y.detach(), *(g for _ in range(2) for g in torch.autograd.grad(y.sum(), wanted, retain_graph=True))]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_norm_behind_it_has_stocks_gradients(checkpointed: bool) -> None:
    model = _Embeddings()
    results = [_step(model, norm, checkpointed) for norm in (nn.functional.layer_norm, ops.layer_norm)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bytes_and_a_weight_that_is_written_on() -> None:
    model = _Embeddings()
    weight = torch.ones(16, requires_grad=True)

    def forward() -> Tensor:
        with frame():
            return ops.layer_norm(model.tokens(IDS), (16,), weight, None)

    # two statistics for each row
    assert kept_bytes(forward) == 2 * 4 * IDS.numel()
    y = forward()
    with torch.no_grad():
        model.tokens.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(("name", "dtype"), [("bert", torch.float32), ("llama", torch.bfloat16)])
def test_models_have_stocks_gradients(name: str, dtype: torch.dtype) -> None:
    stock, ours = (BY_NAME[name].build(dtype).train() for _ in range(2))
    patch_model(ours, BODY)
    batch = BY_NAME[name].make_batch()
    (loss, grads), (found, mine) = step(stock, batch), step(ours, batch)
    assert torch.equal(loss, found)
    assert not differing(mine, grads)
