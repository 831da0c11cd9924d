"""Answers of `estimate` that are stored on disk: when a stored answer is used, and when it is computed again."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hf_actcompress.cli import cache
from hf_actcompress.cli.cache import Answer, place_of, read, write
from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.strategies import DEFAULT, Row
from tests.cli.invoke import SIZES, run

ANSWER = Answer("a table\nof two lines", True, "<p>a page</p>")
# the attribute `hf_actcompress.cli.estimate` is the command, so the module is taken from sys.modules
COMMAND = sys.modules["hf_actcompress.cli.estimate"]


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """A list with one entry for each answer that was computed. Such an answer here is one row and one remark."""
    calls: list[str] = []

    def fill(table, *rest):
        calls.append(table.model)
        table.rows.append(Row(DEFAULT[0], None, why_not=f"this is answer {len(calls)}"))
        table.assumed, table.fits = "nothing", table.room is None

    monkeypatch.setattr(COMMAND, "_fill", fill)
    return calls


def test_the_same_question_is_computed_once(model, computed):
    first, second = run("estimate", model, *SIZES), run("estimate", model, *SIZES)
    assert len(computed) == 1 and first.exit_code == second.exit_code == Exit.OK
    # the real `_fill` prints each row when it is found and the fixture's does not, so only the second output has rows
    assert "assumed: nothing" in first.stdout and second.stdout.endswith(first.stdout)
    assert "this is answer 1" in second.stdout


def test_an_answer_has_its_exit_code_and_its_data(model, computed):
    for _ in range(2):
        result = run("estimate", model, "--gpu", "24GB", "--json")
        assert result.exit_code == Exit.DOES_NOT_FIT and json.loads(result.stdout)["gpu_bytes"] == 24 * 10**9
    assert len(computed) == 1


def test_a_real_answer_is_printed_again_as_it_was(model, tmp_path):
    pages = [tmp_path / "first.html", tmp_path / "second.html"]
    results = [run("estimate", model, *SIZES, "--preset", "exact", "--html", str(page)) for page in pages]
    assert results[0].exit_code == Exit.OK and results[0].stdout == results[1].stdout
    assert pages[0].read_text() == pages[1].read_text() and "1 of 2" in results[0].stderr
    assert results[1].stderr == f"wrote {pages[1]}\n"


@pytest.mark.parametrize(
    "other",
    (("--batch-size", "3"), ("--seq-len", "17"), ("--lora",), ("--preset", "int8"), ("--json",), ("--gpu", "80GB")),
    ids=lambda other: other[0],
)
def test_another_question_is_computed(model, computed, other):
    run("estimate", model)
    run("estimate", model, *other)
    assert len(computed) == 2


def test_another_config_under_the_same_name_is_computed(model, computed):
    run("estimate", model)
    config = json.loads(Path(model).read_text())
    Path(model).write_text(json.dumps({**config, "vocab_size": 65}))
    run("estimate", model)
    assert len(computed) == 2


@pytest.mark.parametrize("what", ("_source", "version_of"))
def test_other_code_is_asked_anew(model, computed, monkeypatch, what):
    run("estimate", model)
    monkeypatch.setattr(cache, what, lambda *name: "another one")
    run("estimate", model)
    assert len(computed) == 2


def test_the_source_is_what_the_files_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)
    hashes = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.json", "2")):
        (tmp_path / name).write_text(text)
        hashes.add(cache._source())
    assert len(hashes) == 3


def test_without_the_cache_nothing_is_read_or_written(model, computed, answers):
    for _ in range(2):
        run("estimate", model, "--no-cache")
    assert len(computed) == 2 and not answers.exists()


def test_what_cannot_be_kept(model, computed, answers):
    run("estimate", model, "--trust-remote-code")
    # answered before anything is computed
    run("estimate", "nowhere.json")
    Path(model).write_text(json.dumps({"configuration_files": ["config.4.0.0.json"]}))
    run("estimate", model)
    assert len(computed) == 2 and not answers.exists()


def test_an_error_is_not_kept(model, answers):
    for _ in range(2):
        assert run("estimate", model, "--preset", "int9").exit_code == Exit.USAGE
    assert not answers.exists()


BROKEN = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "changed": lambda text: text.replace("answer 1", "answer 7"),
    "of something else": lambda text: "[1, 2]",
    "with other fields": lambda text: text.replace('"fits"', '"fit"'),
    "no text": lambda text: "\udcff",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_file_is_made_again(model, computed, answers, how):
    run("estimate", model)
    (place,) = answers.iterdir()
    place.write_text(BROKEN[how](place.read_text()), encoding="utf-8", errors="surrogateescape")
    assert run("estimate", model).exit_code == Exit.OK and len(computed) == 2
    assert "this is answer 2" in run("estimate", model).stdout and len(computed) == 2


def test_readers_and_writers_at_the_same_time(tmp_path):
    place = tmp_path / "answers" / "one.json"
    longer = [Answer("x" * 200_000 + str(i), True, None) for i in range(4)]

    def work(number: int) -> list[Answer | None]:
        found = []
        for _ in range(20):
            write(place, longer[number])
            found.append(read(place))
        return found

    with ThreadPoolExecutor(4) as pool:
        found = [answer for answers in pool.map(work, range(4)) for answer in answers]
    # every read gave a whole answer, and no temporary file is left
    assert all(answer in longer for answer in found) and list(place.parent.iterdir()) == [place]


def test_the_oldest_answers_go(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_MOST", 3)
    monkeypatch.setattr(cache, "_written", lambda path: int(path.stem))
    for number in range(5):
        write(tmp_path / f"{number}.json", ANSWER)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["2", "3", "4"]


def test_a_folder_that_cannot_be_had_is_no_error(model, computed, answers):
    answers.parent.write_text("no folder")
    for _ in range(2):
        assert run("estimate", model).exit_code == Exit.OK
    assert len(computed) == 2


def test_where_answers_are(model, monkeypatch, tmp_path):
    asked = {"trust_remote_code": False}
    monkeypatch.delenv(cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert place_of(model, asked).parent == tmp_path / "xdg" / "hf_actcompress" / "estimates"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place_of(model, asked).parent == tmp_path / ".cache" / "hf_actcompress" / "estimates"


def test_an_answer_that_is_there_needs_no_torch(model, computed):
    run("estimate", model)
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_actcompress.cli import app\n"
        f"result = CliRunner().invoke(app, ['estimate', {model!r}])\n"
        "print(result.stdout, {'torch', 'transformers', 'numpy'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "this is answer 1" in done.stdout and done.stdout.endswith("set()\n"), done.stderr
