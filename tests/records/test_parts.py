"""Parts of larger tensors, such as values in a fused product of queries, keys and values, are kept as copies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress.ops import layer_norm
from hf_actcompress.records import frame
from tests.oracle import assert_equal_bits
from tests.records.test_net import assert_same, inputs, kept, net, stock


def fused(x: Tensor, weight: Tensor, lengths: list[int]) -> Tensor:
    """Attention inside of each image, with changed queries and keys, as vision models compute it."""
    q, k, v = (x @ weight).reshape(-1, 3, 2, 16).permute(1, 2, 0, 3).unbind(0)
    splits = [t.unsqueeze(0).split(lengths, 2) for t in (q * 0.5, k * 0.7, v)]
    outs = [F.scaled_dot_product_attention(*parts).transpose(1, 2) for parts in zip(*splits, strict=True)]
    return torch.cat(outs, 1).reshape(-1, 32)


@pytest.mark.parametrize("lengths", [[64], [40, 24]])
def test_parts_of_a_product_are_copies(lengths: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    a, first, second = (torch.randn(n, generator=generator).requires_grad_() for n in ((64, 32), (32, 96), (32, 32)))

    def forward() -> Tensor:
        return (fused(a + 1, first, lengths) @ second).square().sum()

    assert_same(forward, (a, first, second))
    # stock keeps the whole fused product because of the value
    assert kept(forward, stock) - kept(forward, net) == 2 * a.nbytes


def test_parts_are_not_copied_while_somebody_holds_the_rest() -> None:
    a, _, weight = inputs()
    held: list[Tensor] = []

    def forward() -> Tensor:
        whole = (a + 1) @ torch.cat([weight] * 4, 1)
        held[:] = [whole.detach()]
        return (whole[:, :32].square() + whole[:, 32:64].square()).sum()

    assert_same(forward, (a, weight))
    with net():
        loss = forward()
        addresses = {x.untyped_storage()._cdata for x in held}
    assert saved_storages(loss) == addresses
    del loss

    def both() -> Tensor:
        first, second = ((a + 1) @ torch.cat([weight] * 2, 1)).chunk(2, -1)
        return (first.square() + second.square()).sum()

    # all parts are kept: copies would cost time and save nothing
    assert kept(both, stock) == kept(both, net)


def test_of_a_larger_tensor_our_ops_keep_their_part() -> None:
    """The norm of one token keeps that token, not the sentence."""
    a, _, weight = inputs()

    def forward() -> Tensor:
        return layer_norm((a @ weight)[:6], (32,), weight[0], weight[1], 1e-5).square().sum()

    results = []
    for around in (frame, net):
        with around():
            loss = forward()
        results.append(torch.autograd.grad(loss, (a, weight)))
    assert_equal_bits(*results)
    assert kept(forward, frame) - kept(forward, net) == 18 * 32 * 4


def saved_storages(loss: Tensor) -> set[int]:
    """The storages of the tensors whose squares are summed in the loss."""
    found, pending = set(), [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is not None:
            if type(node).__name__ == "PowBackward0":
                found.add(node._saved_self.untyped_storage()._cdata)
            pending += [before for before, _ in node.next_functions]
    return found


def test_a_part_that_is_written_on_is_stocks_error() -> None:
    a, _, weight = inputs()
    with net():
        whole = (a + 1) @ torch.cat([weight] * 4, 1)
        part = whole[:, :32]
        loss = part.square().sum()
        with torch.no_grad():
            whole.add_(1)
        del whole, part
        loss = loss + (a * 2).square().sum()
    with pytest.raises(RuntimeError, match="inplace operation"):
        loss.backward()
