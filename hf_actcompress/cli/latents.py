"""The options of `estimate` for a model of diffusers, and those that are only for a model of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from ..quick.diffusion import CLASS, Latents, diffusion_config, latents_of
from .flags import MOST
from .strategies import Strategy, chosen

_SIZE = "of a model of diffusers, in"
Height = Annotated[int | None, typer.Option(min=1, max=MOST, help=f"Height {_SIZE} pixels; by default its pipeline's.")]
Width = Annotated[int | None, typer.Option(min=1, max=MOST, help=f"Width {_SIZE} pixels; by default its pipeline's.")]
Frames = Annotated[int | None, typer.Option(min=1, max=MOST, help="Frames, for a model of videos of diffusers.")]
TextTokens = Annotated[
    int | None, typer.Option(min=1, max=MOST, help="Tokens of a caption's states, for a model of diffusers.")
]
SIZES = ("height", "width", "frames", "text_tokens")
# what means nothing for a model of diffusers, or is not estimated for one
_OF_TRANSFORMERS = (
    "seq_len", "lengths", "max_context", "quantization", "qlora", "engine", "fsdp", "trl", "target_len", "quick",
    "trust_remote_code",
)  # fmt: skip


def latents_in(context: typer.Context, model: str, options: dict[str, Any]) -> Latents | None:
    """The latents of a model of diffusers; None for a model of transformers.

    Raises:
        typer.BadParameter: An option was given that is for the other kind of models.
        ModelConfigError: There is no such file, or the class or a size is not known.
    """
    config = diffusion_config(model)
    if config is None:
        _refuse(context, SIZES, f"is for a model of diffusers, by a folder or a JSON config; {model} is none")
        return None
    _refuse(context, _OF_TRANSFORMERS, f"is for models of transformers, and {model} is a {config[CLASS]} of diffusers")
    return latents_of(config[CLASS], config, **{name: options[name] for name in SIZES})


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} {why}")


def rows_for(presets: Sequence[str], latents: Latents | None) -> tuple[Strategy, ...]:
    """The rows of the table. Blocks of diffusers are not computed in tiles and keep no inputs in 8 bits, so rows with
    that would repeat others.
    """
    found = chosen(presets)
    if latents is None or presets:
        return found
    return tuple(row for row in found if row.checkpoint_input is None and row.config != "long")
