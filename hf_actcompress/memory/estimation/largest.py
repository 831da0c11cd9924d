"""The largest batch or the longest sequences that fit, found with a few estimates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quick.cards import card_bytes
from ...quick.formula import largest, longest, tiles_from
from .estimates import Estimates


def max_batch_size(model: Any, *, seq_len: int | None = None, budget: int | str, **options: Any) -> int:
    """The largest batch that fits, found with a few estimates.

    Args:
        model: As for `estimate`.
        seq_len: Tokens of a sequence; None for a model of diffusers.
        budget: Bytes of the device, or a text: "22GiB", or a card such as "rtx4090".
        options: Options of `estimate`: config, dtype, optimizer, lora, gradient_checkpointing, device, autocast.

    Returns:
        The number of sequences; 0 if not even one fits.

    Raises:
        ActCompressError: One of the errors of `estimate`.
    """
    needed, several = _needed(model, **options)
    tokens = several.tokens(seq_len)
    falls = tiles_from(tokens) if options.get("gradient_checkpointing") else None
    return largest(lambda batch_size: needed(batch_size, tokens), card_bytes(budget), falls=falls)


def max_seq_len(
    model: Any, *, batch_size: int, budget: int | str, limit: int | None = None, step: int = 64, **options: Any
) -> int:
    """The longest sequences that fit, found with a few estimates.

    Args:
        model: As for `estimate`.
        batch_size: Number of sequences.
        budget: Bytes of the device, or a text: "22GiB", or a card such as "rtx4090".
        limit: The answer is at most this; by default the number of positions in the model's config.
        step: The answer is a multiple of this, or the limit.
        options: Options of `estimate`.

    Returns:
        The number of tokens; 0 if not even `step` tokens fit.

    Raises:
        ActCompressError: One of the errors of `estimate`.
    """
    needed, several = _needed(model, **options)
    several.tokens(step)
    most = limit or positions_of(model)
    tiled = batch_size if options.get("gradient_checkpointing") else None
    return longest(lambda seq_len: needed(batch_size, seq_len), card_bytes(budget), most, tiled, step)


def _needed(
    model: Any, *, config: Any = "exact", gradient_checkpointing: bool = False, **options: Any
) -> tuple[Callable[[int, int], int], Estimates]:
    """A function of (sequences, tokens) that gives the bytes a device needs, and the estimates behind it."""
    several = Estimates(model, **options)
    checkpointing = gradient_checkpointing
    return lambda batch_size, seq_len: several.device_bytes(batch_size, seq_len, config, checkpointing), several


def positions_of(model: Any) -> int | None:
    """How many positions the model's config states; None if it states none."""
    config = getattr(model, "config", model)
    found = getattr(config, "max_position_embeddings", None)
    return int(found) if isinstance(found, int) and found > 0 else None
