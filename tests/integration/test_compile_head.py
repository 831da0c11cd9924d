"""The products of vocabulary size that a compiled step of a language model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hf_actcompress import patch_model
from hf_actcompress.compilation._backend import _as_it_is
from hf_actcompress.models import heads
from hf_actcompress.private_apis import compile_for_inductor
from tests.families import BY_NAME, Batch, Gradients, relative_error, step
from tests.integration.compiling import build, one_graph

# the most with which logits of 39 tokens stay whole in a graph (`compilation.logits.LARGE`)
VOCABULARY = 26_003
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
BF16, FP32 = torch.bfloat16, torch.float32


def _is_of_vocabulary(node: Node) -> bool:
    tensors = (node, *(x for x in node.args if isinstance(x, Node)))
    return node.target in PRODUCTS and any(VOCABULARY in x.meta["val"].shape for x in tensors)


def _step(model: Any, batch: Batch, dynamic: bool | None = None) -> tuple[Tensor, Gradients, list[int]]:
    """Loss, gradients, and the products of vocabulary size in forward and backward."""
    products: list[int] = []

    def look(graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        products.append(sum(map(_is_of_vocabulary, graph.graph.nodes)))
        return _as_it_is(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=compile_for_inductor(look), fullgraph=True, dynamic=dynamic)
    loss, grads = step(compiled, batch)
    return loss, {name.removeprefix("_orig_mod."): grad for name, grad in grads.items()}, products


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", BF16), ("llama", FP32), ("bert", BF16), ("gpt2-gelu-tanh", FP32)]
)
def test_a_head_computes_three(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its logits where they have at most the bytes of the budget, else a fourth product makes them again."""
    stock, exact = (build(BY_NAME[family], d, vocab_size=VOCABULARY) for d in (dtype, torch.float64))
    exact.load_state_dict(stock.state_dict())
    batch = BY_NAME[family].make_batch("right")
    oracle = step(exact, batch)[1]
    size = batch["input_ids"].numel() * VOCABULARY * dtype.itemsize
    found = {}
    for budget in (size, size - 1):
        monkeypatch.setattr(heads, "KEPT_BYTES", budget)
        found[budget] = _step(patch_model(copy.deepcopy(stock)), batch)
    kept, again = found[size], found[size - 1]
    assert kept[2] == [1, 2] and again[2] == [1, 3]
    assert torch.equal(kept[0], again[0])
    assert relative_error(kept[1], oracle) <= 1.1 * relative_error(again[1], oracle) + 1e-7


def test_a_frozen_head_computes_two() -> None:
    model = patch_model(build(BY_NAME["llama"], vocab_size=VOCABULARY))
    model.lm_head.weight.requires_grad_(False)
    assert _step(model, BY_NAME["llama"].make_batch())[2] == [1, 1]


def test_graphs_for_any_sizes_keep_no_logits() -> None:
    """Nothing says how large they may become."""
    model = patch_model(build(BY_NAME["llama"], vocab_size=VOCABULARY))
    assert _step(model, BY_NAME["llama"].make_batch(), dynamic=True)[2] == [1, 3]


def test_logits_that_are_kept_and_written_are_found() -> None:
    """The graph returns the tensor that it keeps. Backward does not compute with what the caller wrote on it."""
    model = one_graph(patch_model(build(BY_NAME["llama"], vocab_size=VOCABULARY)))
    output = model(**BY_NAME["llama"].make_batch())
    with torch.no_grad():
        output.logits.mul_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.loss.backward()
