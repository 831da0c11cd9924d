"""`PackedMask`: stock's mask of a batch, which is computed only when its values are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .. import compilation
from ..private_apis import without_torch_function
from ..reference.sequences import Band, Sequences


class PackedMask(Tensor):
    """A mask [B, 1, T, T], bool or additive, without memory: it says which tokens see which.

    Our attention does not need its values. All other code gets stock's mask, made once, by the first op that reads it.

    Args:
        sequences: The sequences of packed rows; or a band, for rows of one sequence with padding.
        window: How many keys a query sees to one side, itself included; None: all in its sequence.
        make: Makes stock's mask.
        device: Device of the mask.
        real: Which tokens of a band are not padding, [B, T] bool; None: all.
        dtype: bool (True: attend), or the dtype of the additive mask of eager attention.
    """

    sequences: Sequences | Band
    window: int | None
    make: Callable[[], Tensor]
    made: Tensor | None
    starts: Tensor | None

    @staticmethod
    def __new__(
        cls, sequences: Sequences | Band, window: int | None, make: Callable[[], Tensor], device: torch.device,
        real: Tensor | None = None, dtype: torch.dtype = torch.bool,
    ) -> PackedMask:  # fmt: skip
        shape = sequences.rows, 1, sequences.tokens, sequences.tokens
        x: PackedMask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined]
        x.sequences, x.window, x.make = sequences, window, make
        x.made, x.starts = None, real
        return x

    def values(self) -> Tensor:
        """Stock's mask."""
        if compilation.is_traced_plan():
            raise NotImplementedError("its code reads a mask that has no memory")
        if self.made is None:
            self.made = self.make()
        return self.made

    def bounds(self) -> Tensor | None:
        """Where each sequence starts in the tokens of all rows, and their end, [N + 1] int32; for a band, `real`."""
        if self.starts is None and isinstance(self.sequences, Sequences):
            self.starts = torch.tensor(self.sequences.starts, dtype=torch.int32, device=self.device)
        return self.starts

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PackedMask({self.sequences!r}, window={self.window}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # sizes and dtype need no values; ops on values arrive in `__torch_dispatch__` below
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(PackedMask, PackedMask.values, (args, kwargs or {}))
        return func(*args, **kwargs)
