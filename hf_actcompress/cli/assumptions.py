"""The line in which each command prints its assumptions: what the figures depend on beside the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..quick.diffusion import Latents
from ..quick.question import LORA_RANK

_DEFAULTS: dict[str, Any] = {
    "quantization": None, "autocast": None, "lora": None, "optimizer": None, "target_len": None, "zero": None,
    "processes": 1, "fsdp": 1, "trl": None, "engine": "eager",
}  # fmt: skip


def assumed(
    options: Mapping[str, Any], batch_size: int, seq_len: int, dtypes: Iterable[str], latents: Latents | None = None
) -> str:
    """The line of assumptions.

    Args:
        options: Options of `Estimates`; those left out have their defaults, and without an optimizer none is named.
        batch_size, seq_len: Sequences, and tokens per sequence.
        dtypes: Dtypes of the weights; empty: those in the config.
        latents: What a sample of a model of diffusers is.
    """
    batch = f"batch {batch_size} x {seq_len} without padding"
    if latents is not None:
        shown = latents.pictures
        frames = f" x {shown.frames} frames" if shown.frames > 1 else ""
        batch = f"batch {batch_size} x {shown.height} x {shown.width} pixels{frames}, {shown.text_tokens} text tokens"
    return ", ".join(_parts({**_DEFAULTS, **options, "latents": latents}, batch, "/".join(dtypes)))


def _parts(said: Mapping[str, Any], batch: str, dtypes: str) -> Iterator[str]:
    yield batch
    if said["target_len"]:
        yield f"labels of {said['target_len']} tokens"
    quantization = f" with {said['quantization']}" if said["quantization"] else ""
    yield f"weights {dtypes or 'as in the config'}{quantization}"
    yield f"autocast {said['autocast']}" if said["autocast"] and not said["zero"] else "no autocast"
    if said["lora"]:
        layers = 'peft\'s "all-linear"' if said["latents"] is None else "to_q, to_k, to_v, to_out.0 by add_adapter"
        yield f"LoRA of rank {LORA_RANK if said['lora'] is True else said['lora']} on {layers}"
    else:
        yield "all weights trained"
    if said["optimizer"]:
        paged = " with all of its states on the card (bitsandbytes may move them to the host)"
        yield said["optimizer"] + (paged if "paged" in said["optimizer"] else "")
    yield f"engine {said['engine']}"
    # a command without the option does not name it
    other = "" if said["trl"] is None else " (--trl: TRL's)"
    loss = "the loss of TRL's fused head" if said["trl"] else f"the model's own loss{other}"
    yield loss if said["latents"] is None else "mean squared error of the prediction"
    if said["fsdp"] > 1:
        yield f"one of {said['fsdp']} processes under FSDP2"
    if said["processes"] > 1:
        yield f"one of {said['processes']} under {'ZeRO-' + str(said['zero']) if said['zero'] else 'DDP'}"
    yield "CUDA's fused attention" if said["device"] == "cuda" else "a CPU's attention"
