"""Experts in mxfp4, as gpt-oss has them: codes of 4 bits, and a scale of 8 bits for each 32 of them.

transformers computes with them in kernels that have no backward, and its Trainer refuses to train them. So an estimate
counts what a training on top of them would need: the packed weights, and in the activations' dtype a copy of one
layer's experts at a time, which is made in the forward and once more in the backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ....errors import ModelConfigError
from ....private_apis import innermost_saved_tensor_hooks
from .formats import Format

_WEIGHTS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True)
class _Part:
    """Stands for a saved view of a weight's copy. The copy is dropped, and the backward makes it again."""

    whole: torch.Size
    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def made(self) -> Tensor:
        copy = torch.empty(self.whole, dtype=self.dtype, device=self.device)
        return copy.as_strided(self.shape, self.stride, self.offset)


def _keeping_no_copy(copies: Mapping[str, Tensor]) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """Saved-tensor hooks that keep no copy of a weight. Other tensors go to the hooks that are on already."""
    shapes = {x.untyped_storage()._cdata: x.shape for x in copies.values()}
    outer_pack, outer_unpack = innermost_saved_tensor_hooks() or (lambda x: x, lambda x: x)

    def pack(x: Tensor) -> Any:
        whole = shapes.get(x.untyped_storage()._cdata)
        if whole is None:
            return outer_pack(x)
        return _Part(whole, x.dtype, x.device, x.shape, x.stride(), int(x.storage_offset()))

    def unpack(x: Any) -> Tensor:
        found: Tensor = x.made() if isinstance(x, _Part) else outer_unpack(x)
        return found

    return pack, unpack


class PackedExperts(nn.Module):
    """What packed experts add to their stock class. `pack` turns stock experts into packed ones."""

    stored: Format
    shapes: dict[str, torch.Size]

    @property
    def count(self) -> int:
        """How many weights are packed."""
        return sum(map(math.prod, self.shapes.values()))

    def pack(self, stored: Format) -> None:
        """Exchange the weights [E, in, out] for codes and scales on the meta device."""
        self.stored = stored
        self.shapes = {name: getattr(self, name).shape for name in _WEIGHTS}
        for name, shape in self.shapes.items():
            delattr(self, name)
            count = math.prod(shape)
            for part, nbytes in (("blocks", stored.codes(count)), ("scales", stored.scales(1, count)[0])):
                packed = torch.empty(nbytes, 1, dtype=torch.uint8, device="meta")
                self.register_parameter(f"{name}_{part}", nn.Parameter(packed, requires_grad=False))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The stock forward with a copy of the weights, of which nothing is kept."""
        copies = {name: hidden_states.new_empty(shape) for name, shape in self.shapes.items()}
        hooks = _keeping_no_copy(copies)
        self.__dict__.update(copies)
        del copies
        try:
            with torch.autograd.graph.saved_tensors_hooks(*hooks):
                y: Tensor = super().forward(hidden_states, *args, **kwargs)
        finally:
            for name in _WEIGHTS:
                del self.__dict__[name]
        return y


@cache
def _packed(stock: Any) -> Any:
    return type(f"Packed{stock.__name__}", (PackedExperts, stock), {})


def pack_experts(model: nn.Module, stored: Format, wanted: Callable[[str], bool]) -> None:
    """Exchange the experts of gpt-oss in place, where their path is wanted.

    Raises ModelConfigError for a model that has none.
    """
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    found = [experts for path, experts in model.named_modules() if isinstance(experts, GptOssExperts) and wanted(path)]
    if not found:
        raise ModelConfigError(f"mxfp4 is the format of gpt-oss' experts, and {type(model).__name__} has none to pack")
    for experts in found:
        kind: Any = type(experts)
        experts.__class__ = _packed(kind)
        experts.pack(stored)  # type: ignore[operator]
