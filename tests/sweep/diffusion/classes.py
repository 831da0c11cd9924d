"""Which classes there are: every model of the installed diffusers, found in its packages."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from diffusers import ModelMixin

# the packages of diffusers.models whose classes are compared
PACKAGES = ("transformers", "unets", "controlnets")


def classes(package: str) -> dict[str, Any]:
    """The package's model classes by name, each from the module that defines it."""
    root = importlib.import_module(f"diffusers.models.{package}")
    found: dict[str, Any] = {}
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module.__name__:
                found[name] = value
    return dict(sorted(found.items()))


def parameters(function: Any) -> dict[str, Any]:
    """The parameters of a function and their defaults; `inspect.Parameter.empty` where there is none."""
    given = inspect.signature(inspect.unwrap(function)).parameters
    return {name: parameter.default for name, parameter in given.items() if name not in ("self", "kwargs")}
