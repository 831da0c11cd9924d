"""Bytes that the sums over chunks of the loss head move on a GPU, counted from its ops at the sizes that models have.

`PYTHONPATH=. python -m pytest -s tests/ops/test_head_traffic.py` prints them. The tensors have no data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_actcompress.private_apis import FakeTensorMode
from hf_actcompress.reference import linear_cross_entropy as reference
from hf_actcompress.reference.device_rules import under_rules
from hf_actcompress.reference.linear_rows import linear_rows_bwd
from tests.on_device import OnDevice

aten = torch.ops.aten
# ops that add a product to a sum, or compute a product that is added
SUMS = (aten.mm.dtype, aten.add_.Tensor, aten.addmm_.default, aten.addmm.dtype_out)


class Moved(TorchDispatchMode):
    """Bytes that `SUMS` read and write of fp32 tensors of one size."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.bytes, self.calls = elements, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a CPU has neither of these two ops
        if func is aten.mm.dtype:
            result = args[0].new_empty((args[0].size(0), args[1].size(1)), dtype=args[2])
        else:
            result = kwargs["out"] if func is aten.addmm.dtype_out else func(*args, **kwargs)
        if func in SUMS:
            tensors = [x for x in (*tree_leaves(args), result) if isinstance(x, Tensor) and x.dtype == torch.float32]
            sums = [x.nbytes for x in tensors if x.numel() == self.elements]
            self.bytes += sum(sums)
            self.calls += bool(sums)
        return result


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(reference, "_multiplies_into_fp32", lambda dx: True)
    with under_rules(OnDevice()):
        yield


def counted(tokens: int, hidden: int, vocab: int, by_rows: bool) -> Moved:
    with FakeTensorMode(), Moved((vocab if by_rows else tokens) * hidden) as moved, torch.no_grad():
        h = torch.empty(tokens, hidden, dtype=torch.bfloat16)
        weight = torch.empty(vocab, hidden, dtype=torch.bfloat16)
        if by_rows:
            linear_rows_bwd(lambda part, logits: logits(), h, weight, None, (), (True, True, False))
        else:
            target, row = torch.empty(tokens, dtype=torch.int64), torch.empty(tokens)
            reference.linear_cross_entropy_bwd(row, h, weight, None, target, row, row, (), (True, True, False))
    return moved


# `most` is in GiB. A former version computed each chunk's product separately and then added it, with chunks of at most
# 2^25 elements. Its counts were 1004, 63 and 16
@pytest.mark.parametrize(
    ("tokens", "hidden", "vocab", "most"),
    [(65_536, 4096, 128_256, 64), (16_384, 4096, 128_256, 16), (16_384, 4096, 32_000, 4)],
)
def test_the_sum_of_the_inputs_gradient(tokens: int, hidden: int, vocab: int, most: float) -> None:
    moved = counted(tokens, hidden, vocab, False)
    print(f"{tokens} tokens of {hidden}, {vocab} classes: {moved.bytes / 2**30:.1f} GiB in {moved.calls} products")
    # each product reads and writes the sum once, and nothing else does
    assert moved.bytes == moved.calls * 2 * tokens * hidden * 4
    assert moved.bytes <= most * 2**30


def test_the_sum_of_the_weights_gradient() -> None:
    """A loss outside of the model gives the gradient of the logits in rows. A former version moved 2004 GiB."""
    tokens, hidden, vocab, most = 65_536, 4096, 128_256, 126
    moved = counted(tokens, hidden, vocab, True)
    print(f"{tokens} tokens of {hidden}, {vocab} classes: {moved.bytes / 2**30:.1f} GiB in {moved.calls} products")
    assert moved.bytes == moved.calls * 2 * vocab * hidden * 4
    assert moved.bytes <= most * 2**30
