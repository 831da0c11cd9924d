"""Attention that runs again in backward, as an operation: by a model's eager function, or with a position bias.

Only its q, k and v are kept. It runs again once, when backward first wants its output, and autograd differentiates that
run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from ..modules.base import stock_type
from ..ops.snapshot import alias
from ..reference import replayed_rng, rng_state
from .backward import Backward
from .emit import CallSetting, Emitter
from .step import Operation, Step

_PLAIN = (bool, int, float, str)
# attributes that no forward inside of a layer reads, so that layers can share their code; a cache reads the index
UNREAD = ("layer_idx", "gradient_checkpointing", "_is_hf_initialized")


class AttentionCode:
    """An attention function and what it reads of its module, without the module.

    Args:
        function: A function of transformers' attention interface.
        module: The attention.
        options: Keywords of the call.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module, options: tuple[tuple[str, Any], ...]) -> None:
        self.function, self.kind, self.options = function, stock_type(module), options
        own = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}
        self.state = {name: value for name, value in own.items() if name not in UNREAD}

    @property
    def draws(self) -> bool:
        return bool(dict(self.options).get("dropout"))

    def key(self, sizes: bool = True) -> Hashable:
        """Equal for two attentions that do the same; without sizes, equal for the attention of a small layer, too."""
        state = {k: v for k, v in self.state.items() if sizes or type(v) is not int}
        return self.function, self.kind, self.options, tuple(sorted(state.items()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        module = self.kind.__new__(self.kind)
        module.__dict__.update(self.state, _parameters={}, _modules={}, _buffers={})
        options = dict(self.options) if bias is None else {**dict(self.options), "position_bias": bias}
        out: Tensor = self.function(module, q, k, v, mask, **options)[0]
        return out


def direct_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0, **options: Any
) -> tuple[Tensor]:
    """torch's attention as a function of transformers' interface, for models that call torch directly: [B, T, H, D]."""
    causal = mask is None and getattr(module, "is_causal", False) and q.size(2) > 1
    out = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal, **options)
    return (out.transpose(1, 2),)


class _Run:
    """A run with autograd on: which kernel torch takes depends on whether gradients are wanted.

    Args:
        code: The code that runs.
        setting: The setting of the program.
        cached: Whether keys and values go through a cache, which copies them. How a product of matrices rounds may
            depend on the strides.
        needed: Which of q, k and v want a gradient.
    """

    def __init__(
        self, code: AttentionCode, setting: CallSetting, cached: bool, needed: tuple[bool, ...] = (True,) * 3
    ) -> None:
        self.code, self.setting, self.cached, self.needed = code, setting, cached, needed
        self.__name__, self.__module__ = "own_attention", __name__

    def graph(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        """The output, and the aliases of those of q, k, v and the bias that want a gradient."""
        if self.cached:
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
        wanted = (*self.needed, bias is not None and bias.requires_grad)
        aliases = [None if x is None else alias(x, w) for x, w in zip((q, k, v, bias), wanted, strict=True)]
        with torch.enable_grad(), self.setting.autocasting(q):
            out = self.code(aliases[0], aliases[1], aliases[2], mask, aliases[3])  # type: ignore[arg-type]
        return out, [x for x, w in zip(aliases, wanted, strict=True) if x is not None and w]


class First(_Run):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The output [B, T, H, D], and the generator's state from which dropout was drawn."""
        state = rng_state(q.device) if self.code.draws else None
        return self.graph(q, k, v, mask, bias)[0].detach(), state


class RunAgain(_Run):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, state: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The output, and the graph below it."""
        with nullcontext() if state is None else replayed_rng(state, q.device):
            graph = self.graph(q, k, v, mask, bias)
        return graph[0].detach(), graph


def gradients(dy: Tensor, graph: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, ...]:
    """The gradients of q, k, v and the bias, as far as they want one."""
    out, wanted = graph
    return torch.autograd.grad(out, wanted, dy.to(out.dtype))


@dataclass(frozen=True)
class OwnAttention(Operation):
    """Outputs: out [B, T, H, D], the generator's state before dropout. Inputs: q, k, v [B, H, T, D], mask, bias.

    Mask and bias may be None.
    """

    code: AttentionCode
    cached: bool = False
    again: ClassVar[bool] = True
    differentiates: ClassVar[bool] = True
    keeps: ClassVar[int] = 3

    @property
    def draws(self) -> bool:
        return self.code.draws

    def key(self) -> Hashable:
        return type(self), self.code.key(), self.cached

    def structure(self) -> Hashable:
        return self.code.key(sizes=False)

    def forward(self, e: Emitter, *ins: Node | None) -> tuple[Node, Node]:
        q, k, v, mask, bias = ins
        both = e.call(First(self.code, e.setting, self.cached), q, k, v, mask, bias, like=self._like(e.setting))
        return e.item(both, 0), e.item(both, 1)

    def _like(self, setting: CallSetting) -> Callable[..., Any]:
        def like(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
            b, h, t, _d = q.shape
            out = torch.empty(b, t, h, v.size(-1), dtype=setting.autocast or v.dtype, device="meta")
            return out, torch.empty(0, device="meta")

        return like

    def _again(self, b: Backward, step: Step) -> Node:
        tensors = [None if x is None or not b.is_given(x) else b.want(x) for x in step.ins]
        state = b.want(step.outs[1]) if self.draws else None
        run = RunAgain(self.code, b.setting, self.cached, tuple(b.wants(x) for x in step.ins[:3]))
        return b.call(run, *tensors, state, like=self._like(b.setting))

    def rebuild(self, b: Backward, step: Step) -> None:
        both = self._again(b, step)
        b.shared[step.y] = (b.item(both, 1),)
        b.values[step.y] = b.item(both, 0)

    def backward(self, b: Backward, step: Step) -> None:
        (graph,) = b.shared.get(step.y) or (b.item(self._again(b, step), 1),)
        *heads, _, bias = step.ins
        like = [x for x in (*heads, bias) if x is not None and b.wants(x) and b.is_given(x)]
        b.give_each(like, b.call(gradients, b.dy(step), graph, like=lambda *_: b.empty(like)))
