"""The base class of the results that the package's functions return."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, Self, get_args, get_origin, get_type_hints

from .pictures import Target
from .tables import Table, print_tables


class Report:
    """A result that prints and serialises. A subclass is a frozen dataclass.

    The subclass defines `__str__`, a text of a few lines; `tables`, which a console shows above this text; `derived`,
    the figures that the JSON has beside the fields; and `plot` if a picture of it says more than its tables.
    """

    def tables(self) -> Iterable[Table]:
        """The tables that `print` shows above the text."""
        return ()

    def derived(self) -> dict[str, Any]:
        """Figures computed from the fields, by themselves or added to a field's own value. `from_json` skips them."""
        return {}

    def to_json(self) -> str:
        """All fields, and what follows from them; `from_json` reads it."""
        derived = self.derived()
        return json.dumps({**derived, **asdict(self), **derived}, indent=2)  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that `to_json` wrote.

        Raises:
            ValueError: The text is no JSON of this kind of report.
        """
        data = json.loads(text)
        if not isinstance(data, Mapping):
            raise ValueError(f"{cls.__name__}.from_json takes what {cls.__name__}.to_json wrote")
        found: Self = _built(cls, data)
        return found

    def summary(self) -> str:
        """The text that `print` shows below the tables: the lines of `str`, of 80 columns at most."""
        lines = str(self).splitlines()
        return "\n".join(textwrap.fill(x, 80, subsequent_indent="  ", break_long_words=False) for x in lines)

    def print(self) -> None:
        """The tables and the text on the console; plain text with whole columns where the output is no terminal."""
        print_tables(self.tables(), self.summary())

    def plot(self, target: Target) -> None:
        """Draw the report as a picture.

        Args:
            target: A path whose suffix decides the format (png, svg, pdf), or a binary file for a PNG.

        Raises:
            MissingExtraError: matplotlib is not installed.
            NotImplementedError: A report of this class has no picture.
        """
        raise NotImplementedError(f"a {type(self).__name__} has no picture; print() and to_json() have its figures")


def _built(kind: Any, data: Any) -> Any:
    """A value of the annotated type: JSON has no tuples and no dataclasses."""
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = get_type_hints(kind)
        # a field may have had another name in older files
        found = {f: data[name] for f in fields(kind) for name in (f.metadata.get("formerly"), f.name) if name in data}
        missing = [f.name for f in fields(kind) if f not in found and f.default is f.default_factory is MISSING]
        if missing:
            raise ValueError(f"no JSON of a {kind.__name__}: it has no {', '.join(missing)}")
        return kind(**{f.name: _built(hints[f.name], value) for f, value in found.items()})
    if isinstance(data, list) and get_origin(kind) is tuple:
        inner = get_args(kind)
        each = [inner[0]] * len(data) if len(inner) == 2 and inner[1] is Ellipsis else inner
        return tuple(_built(part, value) for part, value in zip(each, data, strict=True))
    if isinstance(data, list):
        # a union with a tuple in it
        union = next((part for part in get_args(kind) if get_origin(part) is tuple), None)
        return data if union is None else _built(union, data)
    return data
