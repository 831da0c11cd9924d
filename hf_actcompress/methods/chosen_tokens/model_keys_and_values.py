"""The keys and values of all tokens, for layers that run on some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...models.arguments import is_cache
from ...records import current
from .model import Choice, choosing
from .op import chosen_rows, merged_rows


class KeysAndValues:
    """The keys and values of all tokens in one run of a layer, attention by attention.

    Args:
        choice: The tokens that this forward has chosen.
        rows: int64 [B, K], the chosen tokens.
        tokens: S, the number of all tokens of a sequence.

    Attributes:
        noting: Whether the layer runs on all tokens now.
    """

    def __init__(self, choice: Choice, rows: Tensor, tokens: int) -> None:
        self.choice, self.rows, self.tokens = choice, rows, tokens
        self._noted: list[tuple[Tensor, Tensor]] = []
        self.noting, self._turn = False, 0

    def __bool__(self) -> bool:
        return bool(self._noted)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the block runs, the layer runs on all tokens, and `seen` notes their keys and values."""
        self._noted.clear()
        self.noting = True
        try:
            with _within(self), unwatched():
                yield
        finally:
            self.noting = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """While the block runs, the layer runs on the chosen tokens; again in backward if it is checkpointed."""
        self._turn = 0
        with _within(self):
            yield

    def seen(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys, values and mask that an attention call uses in place of its own."""
        if self.noting:
            self._noted.append((k.detach(), v.detach()))
            return k, v, mask
        all_keys, all_values = self._noted[self._turn]
        self._turn += 1
        k, v = merged_rows(k, all_keys, self.rows, 2), merged_rows(v, all_values, self.rows, 2)
        if mask is None and (getattr(module, "is_causal", True) if causal is None else causal):
            mask = self.choice.once(self.rows, self._causal)
        return k, v, mask

    def _causal(self) -> Tensor:
        """bool [B, 1, K, S]: True where a chosen token sees a token."""
        return (torch.arange(self.tokens, device=self.rows.device) <= self.rows[:, :, None]).unsqueeze(1)

    def of_rows(self, value: Any) -> Any:
        """A layer's argument for the chosen tokens: their positions, angles or rows of masks; None for a cache."""
        if is_cache(value):
            return None
        if isinstance(value, ops.PackedMask):
            return self.choice.once(value, lambda: self._mask_rows(value.values()))
        if isinstance(value, (tuple, list)):
            return type(value)(self.of_rows(item) for item in value)
        if isinstance(value, dict):
            return {name: self.of_rows(item) for name, item in value.items()}
        if not isinstance(value, Tensor):
            return value
        batch, tokens = self.rows.size(0), self.tokens
        if value.dim() == 4 and value.shape[2:] == (tokens, tokens):
            return self.choice.once(value, lambda: self._mask_rows(value))
        if value.dim() >= 2 and value.size(1) == tokens and value.size(0) in (1, batch):
            return self.choice.once(value, lambda: chosen_rows(value.expand(batch, *value.shape[1:]), self.rows))
        if value.dim() >= 3 and value.size(2) == tokens and value.size(1) == batch:
            # [kinds, B, S, ...]: positions of several kinds
            return self.choice.once(value, lambda: torch.stack([chosen_rows(kind, self.rows) for kind in value]))
        return value

    def _mask_rows(self, mask: Tensor) -> Tensor:
        """[B, 1 or H, K, S] of a mask [B or 1, 1 or H, S, S]."""
        batch, tokens = self.rows.size(0), self.tokens
        mask = mask.expand(batch, *mask.shape[1:])
        return mask.gather(2, self.rows[:, None, :, None].expand(batch, mask.size(1), -1, tokens))


_current: ContextVar[KeysAndValues | None] = ContextVar("keys and values", default=None)


def keys_and_values() -> KeysAndValues | None:
    """The keys and values of the layer that runs; None outside of the two runs of such a layer."""
    return _current.get()


@contextmanager
def _within(keys: KeysAndValues) -> Iterator[None]:
    token = _current.set(keys)
    try:
        # a layer inside of this one has nothing to choose any more
        with choosing(None):
            yield
    finally:
        _current.reset(token)


def unwatched() -> AbstractContextManager[None]:
    """A context that tells a report: this run of a layer has no gradients, and another run keeps the tensors."""
    return nullcontext() if current.watcher is None else current.watcher.idle()
