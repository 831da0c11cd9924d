"""The line in which each command prints its assumptions: what the figures depend on beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..quick.question import LORA_RANK

_DEFAULTS: dict[str, Any] = {
    "quantization": None, "autocast": None, "lora": None, "optimizer": None, "target_len": None, "zero": None,
    "processes": 1, "fsdp": 1, "trl": None, "engine": "eager",
}  # fmt: skip


def assumed(options: Mapping[str, Any], batch_size: int, seq_len: int, dtypes: Iterable[str]) -> str:
    """The line of assumptions.

    Args:
        options: Options of `Estimates`; those left out have their defaults, and without an optimizer none is named.
        batch_size, seq_len: Sequences, and tokens per sequence.
        dtypes: Dtypes of the weights; empty: those in the config.
    """
    return ", ".join(_parts({**_DEFAULTS, **options}, f"{batch_size} x {seq_len}", "/".join(dtypes)))


def _parts(said: Mapping[str, Any], batch: str, dtypes: str) -> Iterator[str]:
    yield f"batch {batch} without padding"
    if said["target_len"]:
        yield f"labels of {said['target_len']} tokens"
    quantization = f" with {said['quantization']}" if said["quantization"] else ""
    yield f"weights {dtypes or 'as in the config'}{quantization}"
    yield f"autocast {said['autocast']}" if said["autocast"] and not said["zero"] else "no autocast"
    if said["lora"]:
        yield f'LoRA of rank {LORA_RANK if said["lora"] is True else said["lora"]} on peft\'s "all-linear"'
    else:
        yield "all weights trained"
    if said["optimizer"]:
        paged = " with all of its states on the card (bitsandbytes may move them to the host)"
        yield said["optimizer"] + (paged if "paged" in said["optimizer"] else "")
    yield f"engine {said['engine']}"
    # a command without the option does not name it
    other = "" if said["trl"] is None else " (--trl: TRL's)"
    yield "the loss of TRL's fused head" if said["trl"] else f"the model's own loss{other}"
    if said["fsdp"] > 1:
        yield f"one of {said['fsdp']} processes under FSDP2"
    if said["processes"] > 1:
        yield f"one of {said['processes']} under {'ZeRO-' + str(said['zero']) if said['zero'] else 'DDP'}"
    yield "CUDA's fused attention" if said["device"] == "cuda" else "a CPU's attention"
