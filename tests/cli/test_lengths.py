"""`estimate --lengths` and `plan --lengths` read a file with the lengths of a data set and take its longest batch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.lengths import lengths_in, steps_of
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.estimation.estimates import Estimates
from hf_actcompress.memory.planning import plans
from tests.cli.invoke import run

OPTIONS = ("--batch-size", "2", "--preset", "exact", "--json")


def found(model: str, *options: str) -> dict[str, Any]:
    result = run("estimate", model, *OPTIONS, *options)
    assert result.exit_code == Exit.OK, result.output
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def test_the_longest_batch_of_a_file(model: str, tmp_path: Path) -> None:
    lines, listed = tmp_path / "lengths.txt", tmp_path / "lengths.json"
    lines.write_text("12\n40\n\n7\n96\n")
    listed.write_text("[12, 40, 7, 96]")
    assert lengths_in(lines) == lengths_in(listed) == [12, 40, 7, 96]
    expected = found(model, "--seq-len", "96")
    assert found(model, "--lengths", str(lines)) == found(model, "--lengths", str(listed)) == expected
    quick = [
        run("estimate", model, "--quick", "--batch-size", "2", *options)
        for options in (("--lengths", str(lines)), ("--seq-len", "96"))
    ]
    # the formula of --quick may refuse this model; the two commands must print the same in any case
    assert quick[0].output == quick[1].output and quick[0].exit_code == quick[1].exit_code


def test_the_allocator_is_replayed_with_these_lengths(model: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("8\n40\n7\n96\n3\n3\n64\n128\n")
    several = Estimates(model)
    peak = several.device_bytes(2, 128, "exact")
    row = found(model, "--lengths", str(path), "--gpu", f"{peak + 1000}B")["rows"][1]
    assert row["peak_bytes"] == peak and row["tight"]
    replayed = several.replayed(2, 128, "exact", lengths=(40, 96, 3, 128))
    for name in ("reserved_share", "reserved_share_expandable"):
        assert row["estimate"][name] == getattr(replayed, name)
    assert replayed.reserved_share is not None
    options = ("--batch-size", "2", "--preset", "exact", "--lengths", str(path), "--gpu", f"{peak + 1000}B")
    assert "the shares are for batches of 40, 96, 3, 128 tokens" in run("estimate", model, *options).stdout


def test_a_plan_is_for_the_longest_batch(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n96\n7\n")
    asked: list[int] = []

    def refused(model: str, **options: Any) -> None:
        asked.append(options["seq_len"])
        raise ModelConfigError("asked")

    monkeypatch.setattr(plans, "plan", refused)
    for more in (("--lengths", str(path)), ("--seq-len", "96"), ()):
        assert run("plan", model, "--gpu", "24", *more).exit_code == Exit.NO_MODEL
    assert asked == [96, 96, 512]
    path.write_text("many\n")
    result = run("plan", model, "--gpu", "24", "--lengths", str(path))
    assert result.exit_code == Exit.USAGE and "number 1 is 'many'" in result.stderr


@pytest.mark.parametrize("command", ["estimate", "plan"])
def test_lengths_take_the_place_of_one_length(command: str, model: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n")
    given = ("--lengths", str(path)), ("--seq-len", "16")
    for first, second in (given, given[::-1]):
        result = run(command, model, "--gpu", "24", *first, *second)
        assert result.exit_code == Exit.USAGE and "pass only one of them" in result.stderr, result.output


def test_the_batches_of_lengths() -> None:
    assert steps_of([8, 40, 7, 96, 3, 3, 64, 128], 2) == (40, 96, 3, 128)
    assert steps_of([5, 9], 4) == (9, 9)
    assert steps_of([], 4) == ()


BAD = {
    "nothing": ("", "it is empty"),
    "an empty list": ("[]", "it is empty"),
    "words": ("12\nmany\n", "number 2 is 'many'"),
    "half a token": ("[12, 1.5]", "number 2 is '1.5'"),
    "no tokens": ("0\n", "number 1 is '0'"),
    "less than none": ("-3\n", "number 1 is '-3'"),
    "too many": ("9" * 30, "number 1 is '9999"),
    "a yes": ("[true]", "number 1 is 'True'"),
    "half a list": ("[12, ", "it is not a JSON list"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_holds_no_lengths(name: str, model: str, tmp_path: Path) -> None:
    text, said = BAD[name]
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    refused(model, path, said)


def test_a_file_that_cannot_be_read(model: str, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("none", "bytes", ".", "~nobody_of_that_name", "x" * 300):
        refused(model, tmp_path / name, "it cannot be read: ")
    refused(model, Path("~nobody_of_that_name/file"), "it cannot be read: ")


def refused(model: str, path: Path, said: str) -> None:
    result = run("estimate", model, "--lengths", str(path))
    assert result.exit_code == Exit.USAGE, result.output
    assert re.fullmatch("error: Invalid value for --lengths: [^\n]+\n", result.stderr), result.stderr
    assert said in result.stderr and "pass a file with one length per line" in result.stderr
