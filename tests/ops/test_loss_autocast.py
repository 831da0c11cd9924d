"""The loss head under the autocast of a CUDA device, which casts other tensors of a loss than a CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_actcompress import ops
from hf_actcompress.ops import loss_arguments
from tests.ops.loss_head_problem import problem


def test_log_probabilities_are_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the dtype of the logits, and the loss of them is in fp32."""
    *tensors, target = (x.bfloat16() if x.is_floating_point() else x for x in problem(n=200))
    logits = F.linear(*tensors).detach()
    monkeypatch.setattr(loss_arguments, "on_cpu", lambda _: False)
    # what an earlier test has found for a CPU does not count
    monkeypatch.setattr(loss_arguments, "_loss_dtypes", loss_arguments._loss_dtypes.__wrapped__)
    with torch.autocast("cpu", torch.bfloat16):
        h, weight, bias = tensors
        loss = ops.linear_cross_entropy(h, weight, target, bias, logits=logits)
        assert torch.equal(loss, F.nll_loss(torch.log_softmax(logits, 1).float(), target))
        assert loss != F.cross_entropy(logits, target)


@pytest.mark.gpu
@pytest.mark.parametrize("pointwise", ((), (Tensor.float,)), ids=("plain", "upcast"))
def test_values_on_a_gpu(pointwise) -> None:
    """They are stock's bits, whether a model casts its logits to fp32 before its loss (Llama) or not (BERT)."""
    *tensors, target = (x.cuda() for x in problem(n=200, dtype=torch.float32))
    with torch.autocast("cuda", torch.bfloat16):
        logits = F.linear(*tensors)
        expected = F.cross_entropy(logits.float() if pointwise else logits, target)
        h, weight, bias = tensors
        found = ops.linear_cross_entropy(h, weight, target, bias, logits=logits.detach(), pointwise=pointwise)
    assert torch.equal(found, expected)
