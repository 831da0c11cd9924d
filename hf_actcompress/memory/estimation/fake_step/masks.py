"""Answers transformers' questions about masks in a step on tensors that have no values.

Before transformers builds an attention mask it checks whether one is needed: is any token padding, does a row hold
several sequences? It does not check fake tensors, because it takes them for a compiler's, and then builds the mask. So
the few tensors that it checks are given out as real ones, with the values of a batch without padding and with one
sequence in each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ....private_apis import FakeTensor, unset_fake_temporarily
from .fake_allocator import FakeAllocator, all_known

# the functions with which transformers checks; all other functions get fake tensors
_ASKS = frozenset({
    Tensor.__getitem__, Tensor.__eq__, Tensor.eq, Tensor.__invert__, Tensor.sum, Tensor.all, torch.all, Tensor.__bool__,
})  # fmt: skip
# the functions that have a rule here; all others, such as the getters of a tensor, of which there are thousands, are
# called at once
SEEN = _ASKS | {Tensor.to, Tensor.cumsum}


class KnownMasks(TorchFunctionMode):
    """Makes the tensors that transformers checks real. The allocator counts them, if one is given."""

    def __init__(self, allocator: FakeAllocator | None = None) -> None:
        super().__init__()
        self._allocator = allocator
        self._known = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SEEN:
            return func(*args, **kwargs)
        if func in _ASKS and all_known((args, kwargs), self._known):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
            if isinstance(result, Tensor):
                self._known[result] = None
            return result
        result = func(*args, **kwargs)
        if func is Tensor.to and _is_padding_mask(result, kwargs):
            # no token is padding
            return self._real(result, torch.ones)
        if func is Tensor.cumsum and _is_count_of_sequences(args):
            # every token belongs to the first sequence of its row
            return self._real(result, torch.zeros)
        return result

    def _real(self, fake: Tensor, fill: Any) -> Tensor:
        with unset_fake_temporarily():
            # one element, expanded to all places
            real: Tensor = fill((), dtype=fake.dtype).expand(fake.shape)
        if self._allocator is not None:
            self._allocator.count(real, fake.untyped_storage().nbytes())
        self._known[real] = None
        return real


def _is_padding_mask(x: Any, kwargs: Any) -> bool:
    """Whether the call is ``attention_mask.to(device=..., dtype=torch.bool)`` in masking_utils."""
    return kwargs.get("dtype") is torch.bool and "device" in kwargs and isinstance(x, FakeTensor) and x.dim() == 2


def _is_count_of_sequences(args: Any) -> bool:
    """Whether the call is ``(position_diff != 1).cumsum(-1)`` in `find_packed_sequence_indices`."""
    return len(args) == 2 and args[1] == -1 and args[0].dtype == torch.bool and args[0].dim() == 2
