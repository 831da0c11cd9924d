"""Which versions a figure was made with."""

from collections.abc import Sequence
from importlib import metadata


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package -> version, or "not installed"."""
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
