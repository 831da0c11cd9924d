"""Answers of `estimate` on disk: a question that was asked before is answered again without torch.

A file is named by the hash of everything that its answer depends on: the content of the model's config, the options,
this package's source, and the versions of the libraries whose code an estimate runs. So no answer is ever outdated.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError
from ..versions import version_of
from .quick import config_of

# environment variable with the folder of the answers
FOLDER = "ACTCOMPRESS_CACHE"
# the most answers to keep; the oldest ones are deleted
_MOST = 256
_LIBRARIES = ("torch", "transformers", "diffusers", "peft", "triton")
_VARIABLES = ("TRITON_INTERPRET",)
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Answer:
    """The command's whole answer: what is printed on stdout, whether what was asked for fits on the card, and the HTML
    of `--html`, if it was asked for.
    """

    text: str
    fits: bool
    page: str | None


def place_of(model: str, asked: Mapping[str, Any]) -> Path | None:
    """The file of the answer to a model and all options, if it exists or not; None if it cannot be stored."""
    if asked["trust_remote_code"]:
        # the model's own code may read anything, so the answer may depend on more
        return None
    try:
        config = config_of(model)
    except ModelConfigError:
        # `estimate` reports this error in its own words
        return None
    if "configuration_files" in config:
        # which of several config files is read depends on the version of transformers
        return None
    about = {
        "model": model,
        "config": config,
        "asked": dict(asked),
        "source": _source(),
        "versions": {name: version_of(name) for name in _LIBRARIES},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "machine": [platform.machine(), platform.python_version()],
    }
    return _folder() / f"{_hash(json.dumps(about).encode())}.json"


def read(place: Path) -> Answer | None:
    """The stored answer; None if there is none, or if its file is broken."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        answer = Answer(**found["answer"])
        return answer if found["hash"] == _hash_of(answer) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(place: Path, answer: Answer) -> None:
    """Store an answer. If that is impossible (no space, no permission), nothing happens."""
    text = json.dumps({"answer": asdict(answer), "hash": _hash_of(answer)})
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # a process that reads at this moment gets the whole old file or the whole new one
            os.replace(name, place)
        except OSError:
            os.unlink(name)
            raise
        for old in sorted(place.parent.iterdir(), key=_written)[:-_MOST]:
            old.unlink(missing_ok=True)


def _written(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    # another process has deleted the file
    return 0.0


def _folder() -> Path:
    named = os.environ.get(FOLDER)
    if named:
        return Path(named).expanduser() / "estimates"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_actcompress" / "estimates"


def _source() -> str:
    """The hash of this package's source files."""
    files = sorted(path for path in _PACKAGE.rglob("*") if path.suffix in (".py", ".json"))
    return _hash(b"\0".join(str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() for path in files))


def _hash_of(answer: Answer) -> str:
    return _hash(json.dumps(asdict(answer)).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
