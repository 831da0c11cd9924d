"""The arithmetic of a step, counted op by op on fake tensors.

So it is that of the logical weights if these are packed, that of the chosen experts in a mixture, and without the
gradients that frozen weights do not get.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a step, or of a part of it.

    Args:
        products: Of the forward's products with weights.
        attention: Of the forward's queries times keys and probabilities times values.
        backward: Of the whole backward.
        mlp: The part of `products` that is in MLPs that could be computed in tiles.
    """

    products: float
    attention: float
    backward: float
    mlp: float = 0.0

    @property
    def forward(self) -> float:
        return self.products + self.attention

    @property
    def step(self) -> float:
        return self.forward + self.backward

    def plus(self, other: Work, times: int) -> Work:
        """The sum of this and `times` the other."""
        return Work(
            self.products + times * other.products,
            self.attention + times * other.attention,
            self.backward + times * other.backward,
            self.mlp + times * other.mlp,
        )

    def divided(self, by: int) -> Work:
        return Work(self.products / by, self.attention / by, self.backward / by, self.mlp / by)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of products and of attention while it is on. Enter it inside all other modes.

    torch's own FlopCounterMode would decompose ops that the estimate has rules for.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = self.attention = self.inside = 0

    def note(self, modules: Iterable[nn.Module]) -> None:
        """Count the products of these modules' forwards in `inside`, too."""

        def enter(module: nn.Module, args: Any) -> None:
            self.inside -= self.products

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.inside += self.products

        for module in modules:
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(leave)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        formula = _FORMULAS.get(packet) or flop_registry.get(packet)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=result)
            # of attention that is written out, both products are of batches of matrices
            if packet is aten.bmm or "attention" in str(packet):
                self.attention += count
            else:
                self.products += count
        return result


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Products of groups of rows or columns: each group's size is a part of the dimension that has them all."""
    groups = a.size(0) if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.size(-2) * a.size(-1) * b.size(-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(q.shape, *_with_heads_of(q, k, v)))  # type: ignore[no-untyped-call]


def _attention_backward(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(dy.shape, q.shape, *_with_heads_of(q, k, v)))  # type: ignore[no-untyped-call]


def _with_heads_of(q: Tensor, *shared: Tensor) -> list[torch.Size]:
    """The shapes of keys and values as if each head of q had its own: torch 2.11's formula takes no others."""
    return [torch.Size((*q.shape[:2], *x.shape[2:])) for x in shared]


# ops that torch has no formula for, or one that in torch 2.11 takes no heads of keys that queries share
_FORMULAS: dict[Any, Callable[..., int]] = {
    aten._grouped_mm: _grouped,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}
