"""The options that several commands have, and what their values mean."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UnknownOptionError
from ..quick.cards import card_bytes
from ..quick.preset_lines import PRESET_LINES
from ..quick.question import SHORT_DTYPES

# more than any training has, and few enough for bytes to fit into 64 bits
MOST = 2**24

# what --quantization takes; memory/estimation/quantized/formats.py says what they are
QUANTIZATIONS = ("nf4", "fp4", "int8")
# what --dtype takes
DTYPES = (*SHORT_DTYPES, *dict.fromkeys(SHORT_DTYPES.values()), "float64")


def one_length(context: typer.Context, value: Any) -> Any:
    """The callback of --seq-len and --lengths, which exclude each other: the second one given finds the first."""
    if {getattr(context.get_parameter_source(name), "name", "") for name in ("seq_len", "lengths")} == {"COMMANDLINE"}:
        raise typer.BadParameter("--lengths replaces --seq-len: pass only one of them")
    return value


Model = Annotated[
    str, typer.Argument(help="A model on the Hugging Face Hub, a folder with a config.json, or a JSON config.")
]
BatchSize = Annotated[int, typer.Option(min=1, max=MOST, help="Sequences per batch on one device.")]
SeqLen = Annotated[int, typer.Option(min=1, max=MOST, help="Tokens per sequence.", callback=one_length)]
Dtype = Annotated[
    str | None, typer.Option(help="Dtype of the weights: bf16, fp16 or fp32; by default that of the config.")
]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Like TrainingArguments(bf16=True): autocast, fp32 weights.")]
Fp16 = Annotated[bool, typer.Option("--fp16", help="The same with fp16.")]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", "--optim", help="adamw, adamw_8bit, adafactor, sgd, or a name for the Trainer's `optim`."
    ),
]
Lora = Annotated[bool, typer.Option("--lora", help="LoRA on all linear layers; everything else is frozen. Needs peft.")]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", "--lora-r", min=1, max=MOST, help="Rank of LoRA; implies --lora.")
]
Quantization = Annotated[
    str | None, typer.Option(help="Format of frozen weights: nf4, fp4 or int8; by default that of the config.")
]
Qlora = Annotated[bool, typer.Option("--qlora", help="Short for --quantization nf4 --lora.")]
MaxContext = Annotated[
    bool, typer.Option("--max-context", help="Also find the longest sequences that fit on --gpu at --batch-size.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="The card: its name (rtx4090, a100-80gb, t4), or its memory: 24, 24G, 24GB (10^9 bytes), 22GiB (2^30)."
    ),
]
Device = Annotated[str, typer.Option(help="Whose memory rules apply: cuda or cpu.")]
Engine = Annotated[str, typer.Option(help="eager, or compile: with torch.compile, if the model is one graph.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Use a formula: less than a second, within 3%, for the most common models.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compute the answer again, and do not store it.")]
Fsdp = Annotated[
    int, typer.Option(min=1, max=MOST, help="Number of processes that FSDP2 shards over; the figures are per process.")
]
Zero = Annotated[
    int | None,
    typer.Option(min=2, max=3, help="Stage of DeepSpeed's ZeRO over --processes; the figures are per process."),
]
Processes = Annotated[
    int, typer.Option(min=1, max=MOST, help="Number of processes for --zero; without --zero, for DDP.")
]
Trl = Annotated[
    bool, typer.Option("--trl", help="Use the loss of TRL's trainers, whose fused head never holds all logits.")
]
TargetLen = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Length of the labels of an encoder-decoder model; by default --seq-len."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code from the model's repository, if it has any.")
]
Html = Annotated[Path | None, typer.Option(help="Also write a self-contained HTML page.")]


def check_name(what: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownOptionError for a name that is not known, before torch is imported."""
    if name not in known:
        raise UnknownOptionError(what, name, known)


def check_presets(*names: str) -> None:
    """The same for presets, those that another package has registered included."""
    known = getattr(sys.modules.get("hf_actcompress.config"), "PRESETS", PRESET_LINES)
    for name in names:
        check_name("preset", name, ("stock", *known))


def lora_of(lora: bool, rank: int | None) -> bool | int | None:
    """The value of `estimate`'s argument `lora`."""
    return rank if rank is not None else lora or None


def quantization_of(name: str | None, qlora: bool) -> str | None:
    """The value of `estimate`'s argument `quantization`. Raises UnknownOptionError for another name."""
    if name is not None and name not in QUANTIZATIONS:
        raise UnknownOptionError("quantization", name, QUANTIZATIONS)
    return name or ("nf4" if qlora else None)


def card_option(text: str | None) -> int | None:
    """The value of --gpu in bytes."""
    if text is None:
        return None
    try:
        return card_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--gpu") from error


def precision(dtype: str | None, bf16: bool, fp16: bool) -> tuple[str | None, str | None]:
    """(dtype of the weights, dtype of autocast)."""
    if bf16 and fp16:
        raise typer.BadParameter("--bf16 and --fp16 are mutually exclusive")
    if dtype == "":
        raise typer.BadParameter("it is empty; pass bf16, fp16 or fp32", param_hint="--dtype")
    check_name("dtype", (dtype or "float32").removeprefix("torch."), DTYPES)
    autocast = "bfloat16" if bf16 else "float16" if fp16 else None
    return dtype or ("float32" if autocast else None), autocast
