"""The versions that a figure was made with."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .session import environment

ROOT = Path(__file__).parents[2]
OWN = "hf-actcompress"
PEERS = ("liger-kernel", "peft")
PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "peft", OWN)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package -> version, or "not installed"; this package's own is that of the checkout, with its commit."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    if OWN in found:
        found[OWN] = f"{found[OWN].replace('not installed', 'checkout')} at {commit()}"
    return found


def commit() -> str:
    """The checkout's commit, with "+" if files differ from it; "unknown" without git."""
    options = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], **options).stdout.strip()  # type: ignore[call-overload]
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], **options).stdout.strip()  # type: ignore[call-overload]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{found}{'+' if changed else ''}"


def device_name(device: str) -> str:
    """The model of the GPU, or of the CPU: what Python costs in relation to torch differs between CPUs."""
    import torch

    if device == "cuda":
        return torch.cuda.get_device_name()
    # torch 2.11 cannot tell the model
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return f"{known.get('cpu_name', 'CPU')}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def about_here() -> dict[str, Any]:
    """The machine and the versions that this process sees."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else None
    names = {"device": device_name(device), "device_bytes": memory, "python": platform.python_version()}
    return {**names, **versions(PACKAGES)}


def about_this_run(command: str, site: Path | None) -> dict[str, Any]:
    """The same for a job's environment, read in another process: a GPU context here would stay during every job."""
    code = "import json; from common.versions import about_here; print(json.dumps(about_here()))"
    folder = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(site), capture_output=True, text=True, check=True
    )
    return {"command": command, **json.loads(done.stdout.splitlines()[-1])}
