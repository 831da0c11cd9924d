"""What runs below autograd makes no graph, and is seen by who watches ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress.private_apis import above_autograd, below_autograd


class Names(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


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
