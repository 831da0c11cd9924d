"""The versions of other packages that the tests ran with. What is said about another version is said from here."""

from __future__ import annotations

# Package -> the oldest and the newest version with which the tests passed. The newest ones are those of
# constraints.txt; torch's are the ends of tests/results/corners.md. tests/test_versions.py compares them.
TESTED = {
    "torch": ("2.11.0", "2.15.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "accelerate": ("1.15.0", "1.15.0"),
    "datasets": ("5.2.0", "5.2.0"),
    "peft": ("0.21.2", "0.21.2"),
    "trl": ("1.16.0", "1.16.0"),
    "triton": ("3.6.0", "3.9.0"),
    "liger-kernel": ("0.8.5", "0.8.5"),
    "scikit-learn": ("1.9.1", "1.9.1"),
    "diffusers": ("0.42.1", "0.42.1"),
    "bitsandbytes": ("0.50.2", "0.50.2"),
    "sentence-transformers": ("6.2.0", "6.2.0"),
}


def version_of(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    # it takes longer to import than a command without torch takes to answer
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tested(name: str) -> str:
    """The tested versions of a package, as text; "" if none is known."""
    return " to ".join(dict.fromkeys(TESTED.get(name, ())))


def untested(name: str) -> str:
    """How the installed version lies outside of those that were tested; "" if it does not, or none is known."""
    from packaging.version import Version

    found = version_of(name)
    if found is None or name not in TESTED:
        return ""
    # without "+cpu" and the like
    version, (oldest, newest) = Version(Version(found).public), map(Version, TESTED[name])
    if oldest <= version <= newest:
        return ""
    return f"newer than {newest}, the newest tested" if version > newest else f"older than {oldest}, the oldest tested"
