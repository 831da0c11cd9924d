"""The console script `hf-actcompress`. Imports of torch and transformers wait until a command needs them."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from importlib.util import find_spec
from typing import Annotated

import typer

app = typer.Typer(help="Fine-tune transformers with less activation memory.", no_args_is_help=True)

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "trl", "triton", "liger-kernel", "matplotlib")


@app.callback()
def main() -> None:
    """Fine-tune transformers with less activation memory."""


def _environment() -> dict[str, object]:
    """Versions, device, and which implementation the ops will use here."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    import torch

    from .kernels import KERNELS

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    usable = sorted(KERNELS) if gpu and find_spec("triton") else []
    return {
        "hf-actcompress": metadata.version("hf-actcompress"),
        "python": platform.python_version(),
        **versions,
        "gpu": gpu or "none",
        "triton kernels": ", ".join(usable) or "none: the torch reference runs on every device",
    }


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False) -> None:
    """Versions, GPU, and which kernels are usable."""
    environment = _environment()
    if as_json:
        typer.echo(json.dumps(environment, indent=2))
        return
    width = max(map(len, environment))
    for name, value in environment.items():
        typer.echo(f"{name:<{width}}  {value}")
