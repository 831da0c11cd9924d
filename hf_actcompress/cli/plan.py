"""`hf-actcompress plan`: how to keep each layer's tensors so that a training fits on a card."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import DoesNotFitError
from ..quick.headroom import HEADROOM, usable
from ..quick.preset_lines import OBJECTIVES, PLAN_OPTIONS
from . import flags
from .assumptions import assumed
from .common import busy, indented, patch_code, progress, show, writable, wrote
from .flags import card_option, lora_of, precision, quantization_of
from .lengths import Lengths, lengths_in
from .process import for_estimates
from .quick import check_file
from .remedies import as_lines, remedies

if TYPE_CHECKING:
    from ..memory.planning.plans import Plan

Objective = Annotated[
    str, typer.Option(help="fidelity: an exact plan if one fits; speed: the fastest plan, lossy or not.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        help="Besides exact, allow only this option (int8, fp8, int4, offload, checkpoint, checkpoint_with_attention, "
        "compressed_checkpoint, offloaded_checkpoint, tiles); repeatable."
    ),
]
Headroom = Annotated[
    float | None, typer.Option(min=0.0, max=0.9, help="Fraction of the card to leave free; by default 0.08.")
]
Out = Annotated[Path | None, typer.Option(help="Write the plan as JSON to this file; Plan.from_json reads it.")]


def plan(
    model: flags.Model,
    batch_size: flags.BatchSize = 1,
    seq_len: flags.SeqLen = 512,
    lengths: Lengths = None,
    gpu: flags.Gpu = None,
    headroom: Headroom = None,
    objective: Objective = "fidelity",
    allow: Allow = None,
    dtype: flags.Dtype = None,
    bf16: flags.Bf16 = False,
    fp16: flags.Fp16 = False,
    optimizer: flags.Optimizer = "adamw",
    lora: flags.Lora = False,
    lora_rank: flags.LoraRank = None,
    quantization: flags.Quantization = None,
    qlora: flags.Qlora = False,
    device: flags.Device = "cuda",
    engine: flags.Engine = "eager",
    trust_remote_code: flags.TrustRemoteCode = False,
    out: Out = None,
    html: flags.Html = None,
    as_json: flags.Json = False,
) -> None:
    """Choose what each layer stores so that training fits on --gpu.

    Of all plans that fit, it is the cheapest one. Without --gpu, the card of this machine counts. Exits with code 1 if
    even the smallest plan is too large, and says by how much and which smaller batch or sequence would fit; with --gpu
    also what other changes would need.
    """
    weights, autocast = precision(dtype, bf16, fp16)
    room, seq_len = card_option(gpu), max(lengths_in(lengths), default=seq_len)
    out, html = writable("--out", out), writable("--html", html)
    options: dict[str, Any] = {"dtype": weights, "autocast": autocast, "optimizer": optimizer, "device": device}
    options |= {"lora": lora_of(lora or qlora, lora_rank), "quantization": quantization_of(quantization, qlora)}
    options |= {"engine": engine, "trust_remote_code": trust_remote_code}
    asked = _said(allow=_known(allow or (), objective), headroom=headroom, budget=room, objective=objective)
    progress(f"planning {model}")
    check_file(model)
    with busy(f"planning {model}"):
        found = _planned(model, {**asked, "batch_size": batch_size, "seq_len": seq_len}, options, as_json)
    show(found, as_json, assumed(options, batch_size, seq_len, [weights] if weights else []))
    if not as_json:
        typer.echo(f"to train with it:\n{indented(_code(found, out, {**asked, **options}))}")
    _write(found, f"{model}: batch {batch_size} x {seq_len}", out, html)


def _known(allow: Sequence[str], objective: str) -> tuple[str, ...] | None:
    """The options that are allowed; None for all. Raises UnknownOptionError for a name that no plan knows."""
    for name in allow:
        flags.check_name("option of a plan", name, PLAN_OPTIONS)
    flags.check_name("objective", objective, OBJECTIVES)
    return tuple(allow) or None


# options about the model, which has them itself in the code to copy
_OF_MODEL = ("dtype", "lora", "quantization", "trust_remote_code")


def _code(found: Plan, out: Path | None, asked: Mapping[str, Any]) -> str:
    """What patches a model with this plan: by its preset, from the file, or planned again for the model itself."""
    if found.preset is not None:
        return patch_code(found.preset)
    if out is not None:
        return f"""\
from pathlib import Path
from hf_actcompress import Plan, patch_model
patch_model(model, Plan.from_json(Path({str(out)!r}).read_text()))"""
    from ..memory.planning.plans import plan as planned

    usual = {name: known.default for name, known in inspect.signature(planned).parameters.items()}
    sizes = {"batch_size": found.estimate.batch_size, "seq_len": found.estimate.seq_len}
    told = {name: value for name, value in asked.items() if name not in _OF_MODEL and value != usual[name]}
    arguments = ", ".join(f"{name}={value!r}" for name, value in {**sizes, **told}.items())
    return f"""\
from hf_actcompress import patch_model, plan  # or read the file that --out writes
patch_model(model, plan(model, {arguments}))"""


def _planned(model: str, asked: Mapping[str, Any], options: Mapping[str, Any], as_json: bool) -> Plan:
    """The plan. If none fits, print which changes would fit, and raise DoesNotFitError."""
    with for_estimates():
        from ..memory.estimation.estimates import Estimates
        from ..memory.planning.plans import plan as plan_of

        try:
            return plan_of(model, **asked, **options)
        except DoesNotFitError:
            if not as_json and "budget" in asked:
                room = usable(asked["budget"], asked.get("headroom", HEADROOM))
                sizes = asked["batch_size"], asked["seq_len"]
                for line in as_lines(remedies(Estimates(model, **options), room, *sizes, options)):
                    typer.echo(line)
            raise


def _said(**options: Any) -> dict[str, Any]:
    """The options that the user gave; for the others the function's own defaults hold."""
    return {name: value for name, value in options.items() if value is not None}


def _write(found: Plan, title: str, out: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, and say so."""
    from .html_pages import write_plan

    if out is not None:
        out.write_text(found.to_json())
        wrote(out)
    if html is not None:
        write_plan(html, title, found)
        wrote(html)
