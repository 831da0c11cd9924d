"""Changes with which a training would fit, if no strategy does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..quick.sizes import readable_size

if TYPE_CHECKING:
    from ..memory.estimation.estimates import Estimates

# remedies are compared by this strategy, the smallest exact one
STRATEGY = "exact + checkpointing"
# other libraries do this, and this package works together with them
_ON_HOST = "frozen weights on the host by FSDP, DeepSpeed or accelerate"


@dataclass(frozen=True)
class Remedy:
    """A change of the training, and the memory that the training then needs.

    Args:
        name: What is changed, and the option of this command for it.
        nbytes: Bytes that the card must have, under `STRATEGY`.
        fits: Whether the card has them.
    """

    name: str
    nbytes: int
    fits: bool


def remedies(
    several: Estimates, room: int, batch_size: int, seq_len: int, options: Mapping[str, Any]
) -> Iterator[Remedy]:
    """Changes that help, from the least to the most, each by itself. Changes that were made already are left out.

    Args:
        several: Estimates of the model as the user asked for it.
        room: Bytes of the card.
        batch_size, seq_len: Sequences, and tokens per sequence.
        options: The options of these estimates.
    """
    from ..errors import MissingExtraError

    for name, size, changes in _changes(batch_size, options):
        try:
            changed = several.changed(**changes) if changes else several
            nbytes = changed.device_bytes(size, seq_len, "exact", True)
        except MissingExtraError:
            # LoRA cannot be estimated without peft
            continue
        yield Remedy(name, nbytes, nbytes <= room)
    elsewhere = several.frozen_elsewhere()
    if elsewhere and _is_whole(options):
        nbytes = several.device_bytes(batch_size, seq_len, "exact", True) - elsewhere
        yield Remedy(f"{_ON_HOST} ({readable_size(elsewhere)} less)", nbytes, nbytes <= room)


def _changes(batch_size: int, options: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    if batch_size > 1:
        yield "a batch of 1 (--batch-size 1)", 1, {}
    lora = options.get("lora")
    if not lora and "8bit" not in options["optimizer"]:
        yield "an optimizer with states of 8 bits (--optim adamw_8bit)", batch_size, {"optimizer": "adamw_8bit"}
    if not lora:
        yield "LoRA (--lora)", batch_size, {"lora": True}
    # several processes cannot be estimated with quantised weights
    if options.get("quantization") is None and _is_whole(options):
        yield "QLoRA (--qlora)", batch_size, {"lora": lora or True, "quantization": "nf4"}
        if batch_size > 1:
            yield "QLoRA and a batch of 1", 1, {"lora": lora or True, "quantization": "nf4"}


def _is_whole(options: Mapping[str, Any]) -> bool:
    """Whether each process has all weights."""
    return bool(options.get("fsdp", 1) == 1 and options.get("zero") != 3)
