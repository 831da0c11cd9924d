"""`hf-actcompress doctor`: does a patched step on this device what a stock one does, with less memory, in what time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..garbage import frozen_imports
from . import flags
from .assumptions import assumed
from .common import Exit, busy, progress, show
from .flags import check_name, check_presets, lora_of, precision
from .quick import check_file
from .report import Checkpointing, Layers, Preset, host_bytes

if TYPE_CHECKING:
    import torch

    from ..memory.fidelity.checkup_report import CheckUp

_DEVICES = ("cuda", "cpu")

Device = Annotated[str | None, typer.Option(help="Where it runs: cuda or cpu; by default a GPU if there is one.")]
Rounds = Annotated[int, typer.Option(min=1, help="Timed steps of each at most, in half a minute.")]
ModelCard = Annotated[bool, typer.Option("--model-card", help="Print the figures as a part of a model card.")]


def doctor(
    model: flags.Model,
    batch_size: flags.BatchSize = 2,
    seq_len: flags.SeqLen = 128,
    preset: Preset = "exact",
    dtype: flags.Dtype = None,
    bf16: flags.Bf16 = False,
    fp16: flags.Fp16 = False,
    lora: flags.Lora = False,
    lora_rank: flags.LoraRank = None,
    gradient_checkpointing: Checkpointing = False,
    layers: Layers = None,
    device: Device = None,
    rounds: Rounds = 5,
    model_card: ModelCard = False,
    as_json: flags.Json = False,
) -> None:
    """Is a patched step equal to a stock one on this machine, what does it keep, and what does it take.

    Both have the same random weights, tokens and dropout. Exits with 1 if the patched step is not right. It is right if
    its gradients have stock's bits; or if their error against fp64 is at most twice stock's; or, where fp64 is too much
    work or draws other dropout, if they differ from stock's by no more than rounding explains. Of a lossy preset the
    loss has to be equal.
    """
    check_presets(preset)
    weights, autocast = precision(dtype, bf16, fp16)
    check_name("device", device or "cpu", _DEVICES)
    progress(f"checking {model}")
    check_file(model)
    options = {"lora": lora_of(lora, lora_rank), "gradient_checkpointing": gradient_checkpointing, "layers": layers}
    with busy(f"checking {model}"):
        place = _place(device)
        built, batch = _built(model, weights, (batch_size, seq_len), place, options)
        found = _checked(built, batch, preset, autocast, rounds)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in built.parameters()})
    said = {"lora": options["lora"], "device": place.type, "autocast": autocast}
    line = assumed(said, batch_size, seq_len, dtypes)
    if model_card and found.right:
        typer.echo(found.model_card(line))
    else:
        show(found, as_json, line)
    if not found.right:
        raise typer.Exit(Exit.NOT_RIGHT)


def _place(device: str | None) -> torch.device:
    """The device. Raises BadParameter for a GPU that is not there."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no CUDA device here; leave --device out", param_hint="--device")
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _built(
    model: str, dtype: str | None, sizes: tuple[int, int], place: torch.device, options: dict[str, Any]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model and a batch on the device, the same in each run."""
    import torch

    from ..memory.estimation.random_model import local_model, random_batch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = local_model(model, dtype, most_bytes=host_bytes(), **options)
        batch = random_batch(built, *sizes)
    return built.to(place), {name: x.to(place) for name, x in batch.items()}


def _checked(
    model: Any, batch: dict[str, torch.Tensor], preset: str, autocast: str | None, rounds: int
) -> CheckUp:  # fmt: skip
    import torch

    from ..memory.fidelity.checkup import check_up

    place = next(model.parameters()).device
    room = torch.cuda.mem_get_info(place)[0] if place.type == "cuda" else host_bytes()
    dtype = None if autocast is None else getattr(torch, autocast)
    with frozen_imports(), torch.random.fork_rng():
        torch.manual_seed(0)
        return check_up(model, batch, preset, autocast=dtype, rounds=rounds, room=None if room is None else room // 4)
