"""Read from the documents what can be checked: their code, their commands, and the files that they name."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "hf_actcompress"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "tests/UPSTREAM.md")),
    *(path for folder in (PACKAGE, ROOT / "recipes") for path in sorted(folder.rglob("README.md"))),
]
# programs whose command lines are not checked
FOREIGN = {"unzip"}
WITH_ARGUMENTS = re.compile(r"(\w+=\S+ )?(python|pytest|hf-actcompress|pip|accelerate) ")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [body for kind, body in FENCE.findall(text) if kind == language]


def prose(text: str) -> str:
    """The text without its fenced blocks."""
    return FENCE.sub("", text)


def spans(text: str) -> list[str]:
    """The texts between backticks in the prose; such a text may be broken over two lines."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(text))]


def commands(text: str) -> Iterator[list[str]]:
    """Every command of the bash blocks, and every command with arguments between backticks in the prose."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += [span for span in spans(text) if WITH_ARGUMENTS.match(span)]
    for line in lines:
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;")
        lexer.whitespace_split = True
        for word in [*lexer, "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                yield words
                words = []


def places(text: str) -> set[str]:
    """Paths that the prose names: targets of links, and texts between backticks that look like paths."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", prose(text))
    named = [span for span in spans(text) if re.fullmatch(r"\.?[\w.-]+(/[\w.-]+)*/?", span)]
    suffixes = (".py", ".md", ".json", ".yaml", ".toml", ".txt", ".cff", "/")
    return {*links, *(span for span in named if span.endswith(suffixes) or ("/" in span and span[0] != "/"))}


def exists(place: str, document: Path) -> bool:
    """Whether a path exists relative to the root, the package or the document's folder."""
    return any((base / place).exists() for base in (ROOT, PACKAGE, document.parent))


def check(words: list[str]) -> None:
    """Parse a command's options with its own parser. Raises, or exits, if the parser refuses them."""
    while re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    program, arguments = Path(words[0]).name, words[1:]
    if program.startswith("python"):
        _check_python(arguments)
    elif program in _PARSERS:
        _PARSERS[program](arguments)
    else:
        assert program in FOREIGN, f"nobody checks {program!r}"


def _check_python(arguments: list[str]) -> None:
    if arguments[0] != "-m":
        _check_script(arguments[0], arguments[1:])
    elif arguments[1] in _PARSERS:
        _PARSERS[arguments[1]](arguments[2:])
    elif arguments[1] in ("venv", "build"):
        assert all(not argument.startswith("-") for argument in arguments[2:])
    else:
        _check_script(arguments[1], arguments[2:], module=True)


class _Parsed(Exception):
    """A script has parsed its options."""


def _check_script(name: str, arguments: list[str], *, module: bool = False) -> None:
    """Run a script of this repository until its own parser has taken the arguments."""
    real = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *rest: object) -> None:
        real(parser, *rest)
        raise _Parsed

    # Python puts the folder of a script first on the path
    path = [str((ROOT / name).parent), str(ROOT / "recipes"), *sys.path]
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "path", path),
    ):
        try:
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=False)
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        except _Parsed:
            return
        finally:
            # the recipes import modules of these names; another test may import other modules of the same names
            for found in [found for found in sys.modules if found.split(".")[0] in ("common", "tiny")]:
                del sys.modules[found]
    raise AssertionError(f"{name} has no options")


def _check_console_script(arguments: list[str]) -> None:
    from typer.main import get_command

    from hf_actcompress.cli import app

    group = get_command(app)
    command = group.commands[arguments[0]]  # type: ignore[attr-defined]
    command.make_context(arguments[0], arguments[1:])


def _check_pytest(arguments: list[str]) -> None:
    """Check that pytest has the options, that the files exist, and that the marks are registered."""
    from _pytest.config import get_config

    config = get_config()
    for plugin in ("xdist.plugin", "xdist.looponfail"):
        config.pluginmanager.import_plugin(plugin)
    found = config._parser.parse(arguments)
    for place in found.file_or_dir:
        assert list(ROOT.glob(place)), place
        assert found.keyword in "".join(path.read_text() for path in ROOT.glob(place) if path.is_file()), found.keyword
    marks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    names = set(re.findall(r"\w+", found.markexpr or "")) - {"not", "and", "or"}
    assert names <= {re.match(r"\w+", mark)[0] for mark in marks}  # type: ignore[index]


def _check_pip(arguments: list[str]) -> None:
    """Check that pip has the options, that this project has the extras and files, and that requirements are valid."""
    # pip takes away the hook by which setuptools replaces distutils; later, Inductor could not import setuptools
    import setuptools  # noqa: F401
    from packaging.requirements import Requirement
    from pip._internal.commands import create_command

    if arguments[0] not in ("install", "download"):
        raise AssertionError(f"pip {arguments[0]}")
    options, wanted = create_command(arguments[0]).parse_args(arguments[1:])
    assert all((ROOT / name).is_file() for name in options.constraints)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for requirement in [*wanted, *getattr(options, "editables", ())]:
        own = re.fullmatch(r"\.(?:\[([\w,]+)\])?", requirement)
        if own:
            assert set((own[1] or "").split(",")) <= {"", *extras}, requirement
        elif not requirement.startswith("dist/"):
            Requirement(requirement)


def _check_accelerate(arguments: list[str]) -> None:
    from accelerate.commands.launch import launch_command_parser

    assert arguments[0] == "launch"
    found = launch_command_parser().parse_args(arguments[1:])
    assert (ROOT / found.config_file).is_file()
    _check_script(found.training_script, found.training_script_args)


def _check_pre_commit(arguments: list[str]) -> None:
    assert arguments == ["install"]


_PARSERS = {
    "hf-actcompress": _check_console_script,
    "pytest": _check_pytest,
    "pip": _check_pip,
    "accelerate": _check_accelerate,
    "pre-commit": _check_pre_commit,
}
