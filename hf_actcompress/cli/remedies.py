"""Changes with which a training would fit, if no strategy does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ActCompressError
from ..quick.sizes import readable_size
from .common import wrapped

if TYPE_CHECKING:
    from ..memory.estimation.estimates import Estimates

# remedies are compared by this strategy, the smallest exact one
STRATEGY = "exact + checkpointing"
# strategies that are no change of the training but a switch, from the least to the most
_SWITCHES = {
    "checkpointing": ("gradient checkpointing alone", None),
    STRATEGY: ("gradient checkpointing and the preset exact", "exact"),
}
# other libraries do this, and this package works together with them
_ON_HOST = "frozen weights in host memory, with FSDP, DeepSpeed or accelerate"


@dataclass(frozen=True)
class Remedy:
    """A change of the training, and the memory that the training then needs.

    Args:
        name: What is changed, and the option of this command for it.
        nbytes: Bytes that the card must have.
        fits: Whether the card has them.
        strategy: The strategy that the bytes are those of.
    """

    name: str
    nbytes: int
    fits: bool
    strategy: str = STRATEGY


def remedies(
    several: Estimates,
    room: int,
    batch_size: int,
    seq_len: int,
    options: Mapping[str, Any],
    shown: Collection[str] = (),
) -> Iterator[Remedy]:
    """Changes that help, from the least to the most, each by itself. Changes that were made already are left out.

    Gradient checkpointing, which keeps the training as it is, comes first, and only where it is enough.

    Args:
        several: Estimates of the model as the user asked for it.
        room: Bytes of the card.
        batch_size, seq_len: Sequences, and tokens per sequence.
        options: The options of these estimates.
        shown: Names of the strategies whose rows the user sees.
    """
    for strategy, (name, config) in _SWITCHES.items():
        nbytes = None if strategy in shown else _needed(several, batch_size, seq_len, config)
        if nbytes is not None and nbytes <= room:
            yield Remedy(name, nbytes, True, strategy)
    for name, size, changes in changes_of(batch_size, options):
        nbytes = _needed(several, size, seq_len, "exact", changes)
        if nbytes is not None:
            yield Remedy(name, nbytes, nbytes <= room)
    elsewhere = several.frozen_elsewhere()
    nbytes = _needed(several, batch_size, seq_len, "exact") if elsewhere and _is_whole(options) else None
    if nbytes is not None:
        nbytes -= elsewhere
        yield Remedy(f"{_ON_HOST} ({readable_size(elsewhere)} less)", nbytes, nbytes <= room)


def as_lines(found: Iterable[Remedy]) -> Iterator[str]:
    """A line for each change, below the line that says that nothing fits."""
    for remedy in found:
        fits = "would fit" if remedy.fits else "would not fit"
        yield wrapped(f"  {remedy.name}, {remedy.strategy}: {readable_size(remedy.nbytes)}, {fits}", " " * 6)


def _needed(
    several: Estimates, batch_size: int, seq_len: int, config: str | None, changes: Mapping[str, Any] | None = None
) -> int | None:
    """The bytes of a checkpointed training; None if there is no such training of this model, or peft is missing."""
    try:
        changed = several.changed(**changes) if changes else several
        return changed.device_bytes(batch_size, seq_len, config, True)
    except ActCompressError:
        return None


def changes_of(batch_size: int, options: Mapping[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Each change that was not made yet: its name, the batch, and the options of `Estimates` that it changes."""
    if batch_size > 1:
        yield "a batch of 1 (--batch-size 1)", 1, {}
    lora = options.get("lora")
    if not lora and "8bit" not in options["optimizer"]:
        yield "an 8-bit optimizer (--optim adamw_8bit)", batch_size, {"optimizer": "adamw_8bit"}
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
