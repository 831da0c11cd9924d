"""LayerNorm under autocast as on an accelerator: in fp32 for any dtype of the parameters. Here a CPU does this."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from hf_actcompress import ops
from hf_actcompress.methods.norm_output.op import layer_norm_output
from tests.ops.cases import rand
from tests.oracle import assert_equal_bits, gradients

NORMS = {"layer_norm": ops.layer_norm, "layer_norm_output": layer_norm_output}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_parameters_under_autocast(name, dtype, monkeypatch):
    """A bf16 model under autocast. The kernels accept only one dtype, in forward, backward and recomputation."""
    monkeypatch.setattr(sys.modules[NORMS[name].__module__], "autocast_widens", lambda x: True)
    inputs = [rand(2, 5, 8, dtype=torch.bfloat16), rand(8, dtype=dtype), rand(8, dtype=dtype)]
    with torch.no_grad():
        inputs[1].abs_().add_(0.5)
    consumer = rand(8, 8, dtype=torch.float32)

    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.nn.functional.layer_norm(x.float(), (8,), weight.float(), bias.float())
        return torch.nn.functional.linear(y, consumer)

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return ops.linear(NORMS[name](x, (8,), weight, bias), consumer)

    found, expected = gradients(ours, inputs), gradients(stock, inputs)
    if name == "layer_norm":
        assert_equal_bits(found, expected)
    else:
        assert [g.dtype for g in found] == [g.dtype for g in expected]
        # both round once to bf16, after another order of operations in fp32
        torch.testing.assert_close(found, expected)
