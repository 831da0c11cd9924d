"""An additive attention mask that is made for some rows of queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ._packed_sdpa import first_real
from .sequences import Band, Sequences


class MaskRows:
    """The additive mask of transformers' causal eager attention, without a mask of all tokens by all tokens in memory.

    Args:
        sequences: Which tokens see which; a band must be causal.
        window: How many keys a query sees, itself included; None: all.
        dtype: Dtype of the mask.
        bounds: ``sequences.starts`` on the device, [N + 1] int32; for a band, which tokens are not padding, [B, T]
            bool, or None.
        device: Device of the mask.
    """

    def __init__(
        self, sequences: Sequences | Band, window: int | None, dtype: torch.dtype, bounds: Tensor | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._window, self._dtype, self._device = window, dtype, device
        self._keys = torch.arange(sequences.tokens, device=device)
        # [B, T]: tokens with different numbers cannot see each other
        self._parts: Tensor | None = None
        self._real: Tensor | None = None
        if isinstance(sequences, Band):
            self._real = bounds
            if sequences.chunked and bounds is not None and window is not None:
                self._parts = (self._keys - first_real(bounds)).div(window, rounding_mode="floor")
        elif len(sequences.starts) - 1 > sequences.rows:
            assert bounds is not None
            places = torch.arange(sequences.rows * sequences.tokens, dtype=bounds.dtype, device=device)
            self._parts = torch.searchsorted(bounds, places, right=True).view(sequences.rows, sequences.tokens)

    def __call__(self, begin: int, end: int) -> Tensor:
        """The rows of the queries [begin, end): [1 or B, 1, end - begin, T], 0 where a query sees a key."""
        queries, keys = self._keys[begin:end, None], self._keys[None]
        seen = (keys <= queries)[None, None]
        if self._window is not None:
            seen = seen & (keys > queries - self._window)
        if self._parts is not None:
            seen = seen & (self._parts[:, None, begin:end, None] == self._parts[:, None, None])
        if self._real is not None:
            seen = seen & self._real[:, None, None]
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        return torch.where(seen, zero, torch.finfo(self._dtype).min)
