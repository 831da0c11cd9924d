"""Where a model's config is: a file, a folder, or a repository of the hub. It imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..errors import ModelConfigError

CONFIG_NAME = "config.json"
# seconds that the hub has to answer whether it is there
_PATIENCE = 5


def local_path(name: str) -> Path | None:
    """The path of a model that is a file or folder here; None for the name of a repository.

    Raises:
        ModelConfigError: There is no such file or folder, or it holds an adapter and no model.
    """
    path = Path(os.path.expanduser(name))
    looks_local = path.suffix == ".json" or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if os.path.exists(path):
        _check_no_adapter(path)
        return path
    if looks_local:
        raise ModelConfigError(f"no such file or folder: {name}; it should be a config.json or a folder that has one")
    return None


def _check_no_adapter(path: Path) -> None:
    adapter = path / "adapter_config.json"
    if (path / CONFIG_NAME).exists() or not adapter.exists():
        return
    try:
        base = json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    which = f", {base!r}," if base else ""
    raise ModelConfigError(f"{path} is a PEFT adapter and no model: give the base model{which} and --lora")


def reachable(name: str) -> bool:
    """Whether the hub answers a request about that model (also with "not found"); one short attempt."""
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if hub.is_offline_mode():
        return False
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG_NAME), timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        return True
    except Exception:
        # without a connection the exception's type depends on the HTTP library that the hub's client uses
        return False
    return True


def config_of_hub(name: str) -> Path:
    """The config.json of a repository: the hub's, or without a connection the one that was downloaded before.

    Raises:
        ModelConfigError: There is none.
    """
    from huggingface_hub import hf_hub_download

    if not reachable(name):
        return _downloaded(name)
    try:
        return Path(hf_hub_download(name, CONFIG_NAME))
    except Exception as error:
        raise ModelConfigError(_cannot(name, " ".join(str(error).split()))) from error


def check_connection(name: str) -> None:
    """Raise ModelConfigError if the hub does not answer, and the config was not downloaded before."""
    if not reachable(name):
        _downloaded(name)


def _downloaded(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, CONFIG_NAME, local_files_only=True))
    except Exception as error:
        raise ModelConfigError(_cannot(name, "the hub does not answer, and it was not downloaded before.")) from error


def _cannot(name: str, why: str) -> str:
    return (
        f"the config of {name!r} cannot be had: {why} Check the spelling and the connection; without one, pass the "
        "path to a config.json (no weights are needed) or to a folder that has it"
    )
