"""What the fields of a config may hold, as a table, whatever the model: `config_rules.json`.

The formula, the page (`resources/formula.js` reads the same table) and the whole estimate refuse the same configs by
it, before torch is imported. transformers checks the types of fields and few of their values.

| key | what a field must be |
|---|---|
| whole, least, most | a number, whole or not, between these |
| at_most, below, divides | the same beside another field, the first of these that the config has above 0, if any |
| one_of | one of these |
| names, options | a list of texts; an object |
| also | what is allowed besides |
| single | no list |
| unless | the rule does not hold where this field is false |

Numbers in a list are checked one by one. What is null has the default of the model's class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import ModelConfigError

QUANTIZATION = "quantization_config"
_FILE = Path(__file__).with_suffix(".json")
# rules about a whole value, not about the elements of a list
_SINGLE = ("names", "options", "one_of", "single")
_BESIDE = {"at_most": "at most", "below": "below", "divides": "a divisor of"}


@cache
def rules() -> dict[str, list[dict[str, Any]]]:
    """The table: for a config and its parts, and for the options of a quantisation."""
    found: dict[str, list[dict[str, Any]]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def check_config(values: Mapping[str, Any], about: str = "config", where: str = "") -> None:
    """Raise ModelConfigError for the first field that breaks a rule.

    Args:
        values: What a config.json holds, or a part of it.
        about: The rules' name in the table.
        where: The path of that part, for the message.
    """
    for field, value in values.items():
        if value is None:
            continue
        for rule in rules()[about]:
            if re.fullmatch(rule["fields"], str(field)) and values.get(rule.get("unless", "")) is not False:
                _check(rule, f"{where}{field}", value, values)
        if isinstance(value, Mapping):
            check_config(value, field if field in rules() else about, f"{where}{field}.")


def _check(rule: Mapping[str, Any], field: str, value: Any, values: Mapping[str, Any]) -> None:
    single = any(key in rule for key in _SINGLE)
    for x in value if isinstance(value, list) and not single else [value]:
        # a list in a list, and sizes by part as LXMERT has them, are left to the model's class
        plain = single or not isinstance(x, list | Mapping)
        if plain and x not in rule.get("also", ()) and (should := _broken(rule, x, values)):
            said = repr(value) if len(repr(value)) < 80 else f"{repr(value)[:80]}..."
            raise ModelConfigError(f"{field} is {said} in this config, and should be {should}: correct it there")


def _broken(rule: Mapping[str, Any], x: Any, values: Mapping[str, Any]) -> str | None:
    """What the value should be, if it is not."""
    if "names" in rule:
        return None if isinstance(x, list) and all(isinstance(name, str) for name in x) else "a list of names"
    if "options" in rule:
        return None if isinstance(x, Mapping) else "an object with options"
    if "one_of" in rule:
        plain = x.removeprefix("torch.") if isinstance(x, str) else x
        return None if plain in rule["one_of"] else f"one of {', '.join(map(str, rule['one_of']))}"
    if isinstance(x, bool) and not rule.get("whole"):
        # a switch of the same name, as ESM's token_dropout
        return None
    number = type(x) in (int, float) and (x == int(x) if rule.get("whole") and abs(x) < 2**53 else True)
    beside = list(_beside(rule, values))
    if not beside and any(key in rule for key in _BESIDE):
        return None
    least, most = rule.get("least", x), rule.get("most", x)
    if number and least <= x <= most and all(_holds(key, x, other) for key, _, other in beside):
        return None
    return _words(rule, beside)


def _beside(rule: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """The other fields that a rule compares with: the rule's key, the field's name and its value."""
    for key in _BESIDE:
        found = ((name, values.get(name)) for name in rule.get(key, ()))
        yield from [(key, name, x) for name, x in found if type(x) is int and x > 0][:1]


def _holds(key: str, x: Any, other: int) -> bool:
    if key == "divides":
        return bool(x > 0 and other % x == 0)
    return bool(x <= other if key == "at_most" else x < other)


def _words(rule: Mapping[str, Any], beside: list[tuple[str, str, int]]) -> str:
    kind = "a whole number" if rule.get("whole") else "a number"
    least, most = rule.get("least"), rule.get("most")
    span = f"of {least} or more" if most is None else f"from {least} to {most}"
    bounds = [] if least is None else [f"{kind} {span}"]
    bounds += [f"{_BESIDE[key]} {name} ({other})" for key, name, other in beside]
    also = [repr(x) for x in rule.get("also", ())]
    return " or ".join([" and ".join(bounds) or kind, *also])
