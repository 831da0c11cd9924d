"""The graph of a function, as a compiler takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ..compiling import traced_for_compiler
from ..private_apis import inductor_decompositions
from ..private_apis.graphs import ONE_TRACE, any_sizes


def functional(function: Callable[..., Sequence[Any]], values: Sequence[Any]) -> GraphModule:
    """The graph of a function of tensors without data, in Inductor's own ops and without writes in place."""
    mode = next(x.fake_mode for x in values if isinstance(x, Tensor))  # type: ignore[attr-defined]
    with ONE_TRACE, traced_for_compiler(), any_sizes(), mode, torch.no_grad():
        # codecs write in place, and a graph must not
        return make_fx(functionalize(function), decomposition_table=inductor_decompositions())(*values)
