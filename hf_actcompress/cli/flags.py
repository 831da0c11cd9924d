"""The options that several commands have, and what their values mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import UnknownOptionError
from ..quick.cards import card_bytes

# more than any training has, and few enough for bytes to fit into 64 bits
MOST = 2**24

# what --quantization takes; memory/estimation/quantized/formats.py says what they are
QUANTIZATIONS = ("nf4", "fp4", "int8")


def one_length(context: typer.Context, value: Any) -> Any:
    """The callback of --seq-len and --lengths, which exclude each other: the second one given finds the first."""
    if {getattr(context.get_parameter_source(name), "name", "") for name in ("seq_len", "lengths")} == {"COMMANDLINE"}:
        raise typer.BadParameter("--lengths takes the place of --seq-len: pass one of the two")
    return value


Model = Annotated[
    str, typer.Argument(help="A model of the Hugging Face hub, a folder with a config.json, or a bare config JSON.")
]
BatchSize = Annotated[int, typer.Option(min=1, max=MOST, help="Sequences in a batch on one device.")]
SeqLen = Annotated[int, typer.Option(min=1, max=MOST, help="Tokens in a sequence.", callback=one_length)]
Dtype = Annotated[str | None, typer.Option(help="Of the weights: bf16, fp16 or fp32; by default what the config says.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="As TrainingArguments(bf16=True): autocast over fp32 weights.")]
Fp16 = Annotated[bool, typer.Option("--fp16", help="The same with fp16.")]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", "--optim", help="adamw, adamw_8bit, adafactor, sgd; or what `optim` of the Trainer takes."
    ),
]
Lora = Annotated[bool, typer.Option("--lora", help="LoRA on all linear layers; the rest is frozen. Needs peft.")]
LoraRank = Annotated[
    int | None, typer.Option("--lora-rank", "--lora-r", min=1, max=MOST, help="Rank of LoRA; implies --lora.")
]
Quantization = Annotated[
    str | None, typer.Option(help="Of the frozen weights: nf4, fp4 or int8; by default what the config says.")
]
Qlora = Annotated[bool, typer.Option("--qlora", help="The same as --quantization nf4 --lora.")]
MaxContext = Annotated[
    bool, typer.Option("--max-context", help="Also the longest sequences that fit on --gpu, at --batch-size.")
]
Gpu = Annotated[
    str | None,
    typer.Option(
        help="The card, as rtx4090, a100-80gb, t4; or what it has: 24, 24G, 24GB (10^9 bytes each), 22GiB (2^30)."
    ),
]
Device = Annotated[str, typer.Option(help="cuda or cpu: by whose rules.")]
Engine = Annotated[str, typer.Option(help="eager, or compile: under torch.compile, where the model is one graph.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="By a formula, in less than a second, within 3%; for the most common models.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Compute it anew, and keep no answer for the next time.")]
Fsdp = Annotated[
    int, typer.Option(min=1, max=MOST, help="Processes over which FSDP2 shards; the figures are those of one.")
]
Zero = Annotated[
    int | None, typer.Option(min=2, max=3, help="Stage of DeepSpeed's ZeRO over --processes; the figures are of one.")
]
Processes = Annotated[int, typer.Option(min=1, max=MOST, help="Over which --zero divides; without --zero: of DDP.")]
Trl = Annotated[bool, typer.Option("--trl", help="The loss of TRL's trainers, whose fused head makes no logits whole.")]
TargetLen = Annotated[
    int | None,
    typer.Option(min=1, max=MOST, help="Tokens of the labels of an encoder-decoder model; by default --seq-len."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that the model's repository brings, if it does.")
]
Html = Annotated[Path | None, typer.Option(help="Also write one self-contained page.")]


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
        raise typer.BadParameter("--bf16 and --fp16 exclude each other")
    if dtype == "":
        raise typer.BadParameter("it is empty; pass bf16, fp16 or fp32", param_hint="--dtype")
    autocast = "bfloat16" if bf16 else "float16" if fp16 else None
    return dtype or ("float32" if autocast else None), autocast
