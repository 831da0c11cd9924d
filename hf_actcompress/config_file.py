"""A config as data and as a file. The methods have the names that transformers and PEFT use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .errors import UnknownOptionError

if TYPE_CHECKING:
    from os import PathLike

FILE_NAME = "actcompress_config.json"


class ConfigFile:
    """The base of a frozen dataclass whose fields are numbers, texts, and tuples of them."""

    def __repr__(self) -> str:
        """Code that makes an equal config: the fields whose values are not the default's."""
        found = ((field, getattr(self, field.name)) for field in fields(self))  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={value!r}' for f, value in found if value != f.default)})"

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        found: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The config of a dictionary that `to_dict` made, also after JSON; missing fields have their defaults.

        Raises:
            UnknownOptionError: A field that no config has, or a codec that is not registered in this process.
        """
        known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        data = _renamed(data)
        for name in data:
            if name not in known:
                raise UnknownOptionError("option", name, known)
        return cls(**{name: tuples(value) for name, value in data.items()})

    def to_json(self) -> str:
        """As `to_dict`. `from_json` reads it unless a field is a function, of which only the name is written."""
        return json.dumps(self.to_dict(), indent=2, default=_name)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The config that `to_json` wrote. It raises the errors of `from_dict`."""
        return cls.from_dict(json.loads(text))

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Write the config into a folder, beside a model's weights or an adapter's."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        (target / FILE_NAME).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | PathLike[str]) -> Self:
        """The config that `save_pretrained` wrote there.

        Raises:
            FileNotFoundError: The folder holds no such file.
            UnknownOptionError: As `from_dict`.
        """
        return cls.from_json((Path(folder) / FILE_NAME).read_text(encoding="utf-8"))


def _renamed(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a file of version 0.2 and before, whose layers ran as programs or by plans, under today's names."""
    data = {name: value for name, value in data.items() if name != "engine"}
    if "programs" in data:
        data["plans"] = data.pop("programs")
    return data


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", repr(value))
    return name


def tuples(value: Any) -> Any:
    """The value of a field, of which JSON has made a list."""
    return tuple(map(tuples, value)) if isinstance(value, list) else value
