"""Views that plans do without: the same numbers by fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from hf_actcompress import patch_model
from hf_actcompress.graphs.code import forward_code
from hf_actcompress.graphs.fewer_views import fewer_views
from tests.families import BY_NAME, step
from tests.layers.plans import PLANS, plans_of

X, W = torch.randn(2, 3, 8), torch.randn(8, 8)


def _bias_gradient(x: Tensor) -> Any:
    return x.view(6, 8).sum([0], True).view(8)


def _between_views(x: Tensor) -> Any:
    y = x.view(6, 8).mm(W)
    return torch.nn.functional.gelu(y.view(2, 3, 8)).view(6, 8).mm(W)


def _gradient_between_views(x: Tensor) -> Any:
    y = x.view(6, 8)
    found = torch.ops.aten.gelu_backward(y.mm(W).view(2, 3, 8), y.view(2, 3, 8))
    return found.view(6, 8).mm(W), torch.nn.functional.gelu(y.view(2, 3, 8)).view(6, 8).mm(W)


def _summed_otherwise(x: Tensor) -> Any:
    return x.sum([0], True).view(3, 8), x.sum([1], True).view(16), x.sum([1], True)


def _read_in_its_shape(x: Tensor) -> Any:
    y = x.view(6, 8).mm(W).view(2, 3, 8).tanh()
    return y, y.view(6, 8).mm(W)


def _in_another_order(x: Tensor) -> Any:
    return x.view(6, 8).t().reshape(2, 4, 6).tanh().view(8, 6).mm(x.view(6, 8))


def _broadcast(x: Tensor) -> Any:
    return (x.view(6, 8).mm(W).view(2, 3, 8) * x[:1]).view(6, 8)


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (_bias_gradient, 1),
        (_between_views, 1),
        (_gradient_between_views, 1),
        (_summed_otherwise, 1),
        (_read_in_its_shape, 3),
        (_in_another_order, 4),
        (_broadcast, 3),
    ],
)
def test_the_same_numbers_with_fewer_views(call: Callable[[Tensor], Any], left: int) -> None:
    module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(X)
    fewer_views(module.graph)
    module.recompile()
    found, expected = module(X), call(X)
    for ours, stock in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        assert torch.equal(ours, stock) and ours.stride() == stock.stride()
    assert sum(node.target is torch.ops.aten.view.default for node in module.graph.nodes) == left


def test_a_transposed_weight_is_read_by_a_linear_function() -> None:
    """Unless something else reads it, too, or it is returned, or the sum is with another tensor than a bias."""
    bias, full = torch.randn(8), torch.randn(6, 8)

    def call(x: Tensor, w: Tensor, other: Tensor, third: Tensor) -> Any:
        y, turned = x.view(6, 8), third.t()
        alone = torch.addmm(bias, y.mm(w.t()), w.t())
        return alone, torch.addmm(full, y, other.t()), y.mm(turned), turned

    args = (X, W, W + 1, W - 1)
    module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    run: Any = forward_code(module.graph, inputs, list(nodes[-1].args[0]), [])
    with torch.no_grad():
        assert all(map(torch.equal, run(*args), call(*args)))
    assert [name for name, value in run.__globals__.items() if value is torch._C._nn.linear]
    lines = run.source.splitlines()
    names = {name: value for name, value in run.__globals__.items() if name.startswith("c")}
    called = [names[line.split(" = ")[1].split("(")[0]] for line in lines if " = c" in line and "(" in line]
    assert [called.count(x) for x in (torch._C._nn.linear, torch.mm, torch.addmm, torch.t)] == [2, 1, 1, 2]


def test_what_is_packed_behind_a_linear_function() -> None:
    def call(x: Tensor) -> Any:
        y = x.view(6, 8).tanh()
        return W.mm(y.t()), y

    module = make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(X)
    nodes = list(module.graph.nodes)
    product, y = nodes[-1].args[0]
    run: Any = forward_code(module.graph, [nodes[0]], [product], [y], [y])
    found, packed = run(X, [lambda x: x.half()])
    expected, plain = call(X)
    assert torch.equal(found, expected) and torch.equal(packed, plain.half())


def test_a_view_that_changes_nothing_is_no_call() -> None:
    """Dropout asks for an order in memory, and attention with dropout for a shape, that a tensor has already."""
    ours = patch_model(BY_NAME["bert"].build(dropout=0.1), PLANS)
    step(ours, BY_NAME["bert"].make_batch())
    (known,) = plans_of(ours)[0].known()
    codes = known.plan.forward, known.plan.backward(frozenset(), ())[0]
    called = {value for code in codes for value in code.__globals__.values() if callable(value)}
    assert torch.transpose in called and not {torch.permute, Tensor.expand} & called


@pytest.mark.parametrize(("name", "most"), [("bert", 10), ("llama", 11), ("gpt2-gelu-new", 11)])
def test_how_many_views_a_layers_forward_makes(name: str, most: int) -> None:
    ours = patch_model(BY_NAME[name].build(), PLANS)
    step(ours, BY_NAME[name].make_batch())
    (known,) = plans_of(ours)[0].known()
    views = [value for value in known.plan.forward.__globals__.items() if value[1] is Tensor.reshape]
    count = sum(known.plan.forward.source.count(f" {name}(") for name, _ in views)
    assert 0 < count <= most
