"""The code of a whole layer works on rows, so its products need no views. It runs below autograd where it may."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actcompress.private_apis import above_autograd, below_autograd
from tests.families import BY_NAME
from tests.ops.test_dense_attention import Names
from tests.programs.pairs import pair

# the views in a layer's backward: its gradient to rows and back, its input to rows, and between heads and rows what
# attention takes and returns, which is two more if q and k have norms on their heads
MOST_VIEWS = 10


def code_of_backward(name: str) -> str:
    """The code of the first layer's backward, in the family's default setting."""
    model, batch = pair(name)[1], BY_NAME[name].make_batch("none")
    model(**batch).loss.backward()
    layer = next(m for m in model.modules() if getattr(getattr(m, "actcompress", None), "programs", None) is not None)
    whole = layer.actcompress.programs.codes[torch.float32, None].whole
    plans = [plan for part in (whole.part, whole.cached) for plan in part.program.plans.values()]
    found: Any = plans[0].backward
    code: str = found.__self__.code
    return code


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "gpt2-gelu-new", "opt", "vit"])
def test_products_need_no_views(name: str) -> None:
    code = code_of_backward(name)
    assert "view_as(" not in code and "torch_Tensor_view(" not in code and "flatten(" not in code
    assert 0 < code.count("torch_Tensor_reshape(") <= MOST_VIEWS


def test_ops_below_autograd_make_no_graph_and_those_above_do() -> None:
    x = torch.ones(3, requires_grad=True)
    with below_autograd():
        assert (2 * x).grad_fn is None
        with above_autograd():
            y = (2 * x).sum()
    assert torch.autograd.grad(y, x)[0].tolist() == [2.0] * 3


def test_who_watches_ops_sees_what_autograd_dispatches() -> None:
    """Below autograd a mode would see `linear` as one op, and count no product."""
    x = torch.ones(2, 3)
    with Names() as outside:
        torch.nn.functional.linear(x, x)
    with Names() as inside, below_autograd():
        torch.nn.functional.linear(x, x)
    assert inside.names == outside.names and "mm" in inside.names
