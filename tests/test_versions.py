"""What is said about versions of torch and transformers that the tests did not run with."""

from __future__ import annotations

import json
import logging
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

from hf_actcompress import CompressionConfig, patch_model, patch_report, patching, versions
from hf_actcompress.versions import TESTED, untested
from tests.cli.invoke import run
from tests.families import BY_NAME

ROOT = Path(__file__).parent.parent
LLAMA, BERT, OPT = BY_NAME["llama"], BY_NAME["bert"], BY_NAME["opt"]
STOCK = metadata.version


def fake(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found.get(name) or STOCK(name))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings of patch_model, as in a new process."""
    patching._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_actcompress"):
        yield lambda: caplog.messages
    patching._say_once.cache_clear()


def test_the_tested_versions_are_those_of_the_pins_and_of_the_corners() -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    # what builds the documentation runs nothing of this package
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    assert all(pins.pop(re.match(r"[\w-]+", name)[0]) for name in extra)
    assert pins.keys() == TESTED.keys()
    torch = pins.pop("torch")
    assert Version(TESTED["torch"][0]) <= Version(torch) <= Version(TESTED["torch"][1])
    assert pins == {name: newest for name, (_, newest) in TESTED.items() if name != "torch"}
    rows = json.loads((ROOT / "tests/results/corners.json").read_text())
    for name, ends in TESTED.items():
        ran = sorted(Version(Version(row[name]).public) for row in rows if name in row)
        if ran:
            assert str(ran[0]) == ends[0] and Version(ends[1]) >= ran[-1], name
    low = re.search(r'"transformers>=([\d.]+),<6"', (ROOT / "pyproject.toml").read_text())
    assert low is not None and versions.tested("transformers").startswith(low[1])


@pytest.mark.parametrize(
    "version, expected",
    [
        (TESTED["torch"][0], ""),
        (f"{TESTED['torch'][1]}+cu132", ""),
        ("2.13.1", ""),
        ("2.99.0", f"newer than {TESTED['torch'][1]}, the newest tested"),
        ("2.99.0.dev20270101+cpu", f"newer than {TESTED['torch'][1]}, the newest tested"),
        ("2.10.0", f"older than {TESTED['torch'][0]}, the oldest tested"),
    ],
)
def test_a_version_is_compared_with_the_tested_ones(
    version: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, torch=version)
    assert untested("torch") == expected
    assert untested("a package that nobody has") == untested("packaging") == ""


@pytest.mark.parametrize("name, version", [("transformers", "5.99.0"), ("torch", "2.99.0")])
def test_one_line_about_a_newer_release(
    name: str, version: str, said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, **{name: version})
    for model in (BERT.build(), BERT.build(), OPT.build()):
        patch_model(model)
        assert patch_report(model).fall_backs() == []
    assert said() == [f"{name} {version} is newer than {TESTED[name][1]}, the newest tested"]


def test_the_line_says_what_fell_back(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each kind of model, whatever the number of its layers."""
    fake(monkeypatch, transformers="5.99.0")
    for _ in range(2):
        model = LLAMA.build(num_hidden_layers=4)
        for layer in model.model.layers:
            layer.forward = layer.forward
        patch_model(model, CompressionConfig())
    lost = patch_report(model).fall_backs()
    (line,) = said()
    assert lost[0].startswith("4 layer: ") and "module by module" in lost[0]
    assert line.startswith("transformers 5.99.0 is newer than") and "\n" not in line
    assert "left to their own code in LlamaForCausalLM: 4 layer: " in line and line.endswith("see patch_report(model)")


def test_nothing_is_said_of_a_tested_release(said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, torch=TESTED["torch"][1], transformers=TESTED["transformers"][1])
    patch_model(BERT.build())
    assert said() == []


@pytest.mark.parametrize(
    "version, expected",
    [
        (TESTED["peft"][1], f"{TESTED['peft'][1]} (tested: {versions.tested('peft')})"),
        ("9.0.0", f"9.0.0 (newer than {TESTED['peft'][1]}, the newest tested)"),
        ("0.18.0", f"0.18.0 (older than {TESTED['peft'][0]}, the oldest tested)"),
    ],
)
def test_env_says_what_is_tested(version: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, peft=version, transformers="5.99.0")
    text = run("env").stdout
    assert re.search(rf"^peft +{re.escape(expected)}$", text, re.M)
    assert re.search(r"^transformers +5\.99\.0 \(newer than .*, the newest tested\)$", text, re.M)
    found = json.loads(run("env", "--json").stdout)
    assert found["tested"].keys() <= TESTED.keys() and found["tested"]["peft"] in expected
    assert found["packages"]["peft"] == version
