"""Helpers for the tests of torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from hf_actcompress import kept_bytes
from hf_actcompress.compilation._backend import _as_it_is
from hf_actcompress.private_apis import compile_for_inductor, graph_call
from tests.families import BY_NAME, Family, Gradients, differing, relative_error

BACKEND = "hf_actcompress"

three = pytest.mark.parametrize(
    "family", [BY_NAME[n] for n in ("bert", "gpt2-gelu-tanh", "llama")], ids=lambda f: f.name
)


class Gated(nn.Module):
    """A norm and a gated MLP. The last weight's gradient and the up projection's read the SiLU's result."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.SiLU()
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        y: Tensor = x + self.down(self.act(self.gate(inner)) * self.up(inner))
        return y


def with_calls(model: nn.Module, dynamic: bool | None = None) -> tuple[Any, list[list[Node]]]:
    """The model with Inductor's graphs, which run op by op, and the calls of graphs in each of them."""
    calls: list[list[Node]] = []

    def look(graph: GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        calls.append([node for node in graph.graph.nodes if node.target is graph_call()])
        return _as_it_is(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=compile_for_inductor(look), fullgraph=True, dynamic=dynamic), calls


def build(family: Family, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    model = family.build(dtype, **options)
    if family.name.startswith("gpt2"):
        # without a loss type transformers logs a warning, which cannot be traced
        model.loss_type = "ForCausalLM"
    return model


def one_graph(model: nn.Module, backend: str = BACKEND) -> Any:
    return torch.compile(model, fullgraph=True, backend=backend)


def kept_by(model: Any, batch: dict[str, Any]) -> int:
    """Bytes that one forward keeps, once it is compiled."""
    model(**batch)
    return kept_bytes(lambda: model(**batch), "cpu")


def same_step(
    ours: tuple[Tensor, Gradients], stock: tuple[Tensor, Gradients], *, rms_norms: bool, limit: float = 1e-6
) -> None:
    """The loss is bit-equal. Gradients are bit-equal too, except in fp32 in models with RMSNorms.

    There x is read twice inside the norm and once outside. A mark returns the sum of the first two gradients, while the
    stock graph adds the three one after the other. So the sums are rounded differently in each layer.
    """
    assert torch.equal(ours[0], stock[0])
    if rms_norms:
        assert relative_error(ours[1], {name: g.double() for name, g in stock[1].items()}) < limit
    else:
        assert not differing(ours[1], stock[1])
