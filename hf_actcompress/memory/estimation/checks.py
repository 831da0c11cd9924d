"""Checks of options that need or exclude each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import ModelConfigError, UnknownOptionError
from ..measurement.compiled import compiled_modules, uncompiled
from .assembly import ENGINES

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
