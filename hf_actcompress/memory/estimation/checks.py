"""Checks of options that need or exclude each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import ModelConfigError, UnknownOptionError
from ...quick.diffusion import CLASS, Latents, PictureSizes, diffusion_config, latents_of
from ..measurement.compiled import compiled_modules, uncompiled
from .assembly import ENGINES
from .fake_step.latents import class_of

DEVICES = ("cuda", "cpu")


def on_cuda(device: str) -> bool:
    """Whether the rules are CUDA's. Raises UnknownOptionError for an unknown device."""
    if device not in DEVICES:
        raise UnknownOptionError("device", device, DEVICES)
    return device == "cuda"


def is_compiled(model: Any, device: str, engine: str | None) -> bool:
    """Whether to estimate the model as a compiled one. Raises UnknownOptionError for an unknown device or engine."""
    on_cuda(device)
    if engine is None:
        return isinstance(model, nn.Module) and compiled_modules(model) == [uncompiled(model)]
    if engine not in ENGINES:
        raise UnknownOptionError("engine", engine, ENGINES)
    return engine == "compile"


def check_processes(compiled: bool, fsdp: int, zero: int | None, processes: int, trl: bool) -> None:
    """Raise ModelConfigError if the model cannot be divided among processes in the way that is asked for."""
    if fsdp < 1 or (fsdp > 1 and compiled):
        raise ModelConfigError(f'fsdp is a number of processes, and not for engine="compile"; got {fsdp}')
    if processes < 1 or (fsdp > 1 and (zero is not None or processes > 1)):
        raise ModelConfigError("processes is a number of them, with or without zero (stage 2 or 3) and without fsdp")
    if trl and (compiled or fsdp > 1):
        raise ModelConfigError('TRL\'s head is estimated without fsdp and with engine="eager"')


def latents_for(source: Any, sizes: PictureSizes) -> Latents | None:
    """The latents of a model of diffusers; None for a model of transformers.

    Args:
        source: The model, its config, or a name, as for `estimate`.
        sizes: Height and width in pixels, frames and tokens of the caption; None: as usual.

    Raises:
        ModelConfigError: A class or a size that is not known, or a size for a model of transformers.
        TypeError: Another name of a size.
    """
    unknown = sizes.keys() - PictureSizes.__annotations__
    if unknown:
        raise TypeError(f"there is no option {unknown.pop()!r}")
    whole = uncompiled(source) if isinstance(source, nn.Module) else None
    config: Any = diffusion_config(source) if whole is None else getattr(whole, "config", None)
    name = class_of(whole) if whole is not None else config and config[CLASS]
    if name:
        return latents_of(name, config, **sizes)
    given = [option for option, size in sizes.items() if size is not None]
    if given:
        raise ModelConfigError(f"{given[0]} is of the pictures of a model of diffusers; for this model pass seq_len")
    return None


def tokens_of(latents: Latents | None, seq_len: int | None) -> int:
    """Tokens of a sample.

    Raises:
        ModelConfigError: A length was given for a model of diffusers, or none for a model of transformers.
    """
    if latents is not None and seq_len is not None:
        raise ModelConfigError("seq_len is of models of transformers; for one of diffusers pass height and width")
    if latents is not None:
        return latents.tokens
    if seq_len is None:
        raise ModelConfigError("seq_len is missing: pass how many tokens a sequence has")
    return seq_len


def check_diffusion(**options: Any) -> None:
    """Raise ModelConfigError for an option that is not estimated for models of diffusers."""
    given = [name for name, value in options.items() if value]
    if given:
        raise ModelConfigError(f"{given[0]} is not estimated for a model of diffusers; leave it out")


def refuse_diffusion(source: Any) -> None:
    """Raise ModelConfigError for a model of diffusers, of which there is an estimate and nothing else."""
    if isinstance(source, nn.Module):
        name = class_of(uncompiled(source))
    else:
        name = (diffusion_config(source) or {}).get(CLASS)
    if name is not None:
        raise ModelConfigError(
            f"{name} is of diffusers, whose models `estimate` takes; this is for transformers' models"
        )
