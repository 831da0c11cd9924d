"""Says what to install where a recipe needs a package that is missing. It is imported before such packages are."""

import sys
from pathlib import Path
from types import TracebackType

RECIPES = Path(__file__).parents[1]
# packages that have another name in a package index
NAMES = {"sklearn": "scikit-learn"}


def say_missing(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """One line about a missing package; every other error is shown as Python shows it."""
    # a part of a package that is installed is missing where versions do not fit: there the traceback helps
    if not isinstance(error, ModuleNotFoundError) or not error.name or "." in error.name:
        sys.__excepthook__(kind, error, traceback)
        return
    package = NAMES.get(error.name, error.name.replace("_", "-"))
    print(
        f"this recipe needs {package}, which is not installed: pip install {package}\n"
        "(from a checkout, pip install '.[recipes,stacks]' installs what all recipes need)",
        file=sys.stderr,
    )


# another program that imports parts of a recipe keeps its own hook
if Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve().is_relative_to(RECIPES):
    sys.excepthook = say_missing
