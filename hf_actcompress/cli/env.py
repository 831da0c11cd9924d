"""`hf-actcompress env`: what a bug report needs: versions, machine, settings, the kernels in use, known conflicts."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ..versions import TESTED, tested, untested, version_of
from . import flags
from .common import echo_json

_NAME = "hf-actcompress"
_PACKAGES = (
    "torch", "transformers", "accelerate", "peft", "datasets", "trl", "triton", "liger-kernel", "deepspeed",
    "bitsandbytes", "sentence-transformers", "torchao", "flash-attn", "matplotlib",
)  # fmt: skip
# package -> a known conflict
_KNOWN = {
    "liger-kernel": "replaces the forward of the modules it patches; patch_model leaves those alone and says so",
}
# environment variables that change what runs, or how much memory it takes
_VARIABLES = (
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS",
    "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", "HF_HUB_OFFLINE", "HF_ACTCOMPRESS_TIMING",
)  # fmt: skip


def env(as_json: flags.Json = False) -> None:
    """Print what a bug report needs: versions, kernels, conflicts."""
    found = _environment()
    if as_json:
        echo_json(found)
        return
    lines = {
        **{name: value for name, value in found.items() if isinstance(value, str)},
        **{name: _with_note(version, found["tested"].get(name)) for name, version in found["packages"].items()},
        **found["variables"],
        **{f"kernel {name}": status for name, status in _folded(found["kernels"]).items()},
        **{f"conflict {number}": text for number, text in enumerate(found["conflicts"], 1)},
    }
    width = max(map(len, lines))
    for name, value in lines.items():
        typer.echo(f"{name:<{width}}  {value}")


def _environment() -> dict[str, Any]:
    import torch

    from ..dispatch import kernel_status

    cuda = torch.cuda.is_available()
    return {
        _NAME: version_of(_NAME) or "not installed, running from source",
        "location": str(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads",
        "gpu": "; ".join(map(_gpu, range(torch.cuda.device_count()))) if cuda else "none",
        "cuda of torch": torch.version.cuda or "none",
        "packages": {name: version_of(name) for name in _PACKAGES},
        "tested": {name: _standing(name) for name in _PACKAGES if name in TESTED and version_of(name)},
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "kernels": kernel_status("cuda" if cuda else "xpu" if torch.xpu.is_available() else "cpu"),
        "conflicts": [*_too_old_or_new(), *(f"{name}: {text}" for name, text in _KNOWN.items() if version_of(name))],
    }


def _standing(name: str) -> str:
    return untested(name) or f"tested: {tested(name)}"


def _with_note(version: str | None, standing: str | None) -> str:
    return version or "not installed" if standing is None else f"{version} ({standing})"


def _gpu(index: int) -> str:
    import torch

    properties = torch.cuda.get_device_properties(index)
    gib = properties.total_memory / 2**30
    return f"{properties.name}, {gib:.1f} GiB, compute capability {properties.major}.{properties.minor}"


def _too_old_or_new() -> Iterator[str]:
    """The packages whose installed version is outside of the range that this package supports."""
    from importlib import metadata

    from packaging.requirements import Requirement

    ranges = {}
    for text in (metadata.requires(_NAME) or ()) if version_of(_NAME) else ():
        requirement = Requirement(text)
        if requirement.name != _NAME and requirement.specifier:
            ranges[f"{requirement.name}{requirement.specifier}"] = requirement
    for requirement in ranges.values():
        version = version_of(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is installed, but {_NAME} needs {requirement.specifier}"


def _folded(kernels: dict[str, str]) -> dict[str, str]:
    """The kernels' status; a single line if it is the same for all."""
    statuses = set(kernels.values())
    return {"(all)": statuses.pop()} if len(statuses) == 1 else kernels
