"""Answers to code that asks for the values of tensors, which fake tensors do not have."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelConfigError
from ....private_apis import FakeTensor

aten = torch.ops.aten

_IGNORE_INDEX = -100
# ops that ask for values, and ops from whose results some answers follow
ASKS = frozenset((
    aten._fused_sdp_choice.default, aten._local_scalar_dense.default, aten.equal.default, aten.index.Tensor,
    aten.nonzero.default,
))  # fmt: skip
TELLS = frozenset((
    aten._is_all_true.default, aten.all.default, aten.all.dim, aten.constant_pad_nd.default,
    aten.masked_scatter.default,
))  # fmt: skip
# results of torch's op that chooses a CPU's attention kernel
_MATH, _FUSED = 0, 1


class Answers:
    """The answers for a batch without padding, all of whose labels count except those that the model itself appends
    (the last position of a causal model).
    """

    def __init__(self) -> None:
        # results of `all`, which are true, because nothing is padded
        self._true: list[weakref.ref[Tensor]] = []
        # how many rows of picture features were scattered among those of the text
        self._scattered: int | None = None
        self._appended_labels = 0

    def learn(self, func: Any, args: Any, result: Any) -> None:
        """Note what the result of one of `TELLS` says."""
        if func in (aten.all.default, aten.all.dim, aten._is_all_true.default):
            self._true.append(weakref.ref(result))
        if func is aten.constant_pad_nd.default and args[2:3] == (_IGNORE_INDEX,):
            self._appended_labels = result.numel() - args[0].numel()
        if func is aten.masked_scatter.default:
            self._scattered, room = (x.numel() // args[0].size(-1) for x in (args[2], args[0]))
            if self._scattered > room:
                raise ModelConfigError(
                    f"the pictures become {self._scattered} tokens, and the batch has {room}: ask for longer sequences"
                )

    def to(self, func: Any, args: Any) -> Callable[[], Any] | None:
        """A function that gives the answer to a call of one of `ASKS`; None if the op itself gives the right one."""
        if func is aten._fused_sdp_choice.default:
            dropout = args[4] if len(args) > 4 else 0.0
            return lambda: _FUSED if dropout == 0 else _MATH
        x = args[0] if args else None
        if not isinstance(x, FakeTensor):
            return None
        if func is aten._local_scalar_dense.default:
            # "are all of them ...?" is answered with yes, "is any ...?" with no, "how many ...?" with zero
            return lambda: any(known() is x for known in self._true) if x.dtype == torch.bool else 0
        if func is aten.equal.default:
            return lambda: True
        if func is aten.index.Tensor and len(args[1]) == 1 and args[1][0].dtype == torch.bool:
            mask = args[1][0]
            selected = mask.numel() if self._scattered is None else self._scattered
            return lambda: x.new_empty(selected, *x.shape[mask.dim() :])
        if func is aten.nonzero.default:
            return lambda: x.new_empty(x.numel() - self._appended_labels, x.dim(), dtype=torch.int64)
        return None
