"""The pages that --html writes can be read and sorted in a browser without a network."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest

from hf_actcompress.cli.html_pages import _several
from hf_actcompress.display.html import html_page
from tests.browser import looked_at, needs_browser
from tests.cli.conftest import CONFIG
from tests.cli.invoke import SIZES, run

CLICK = "[...page.querySelectorAll('th button')].find((button) => button.textContent === '{}').click();"


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, str]:
    """The pages of the commands for a model with a long name."""

    folder = tmp_path_factory.mktemp("pages")
    model = folder / f"{'a_rather_long_name_' * 4}.json"
    model.write_text(json.dumps(CONFIG))
    found = {}
    asked = {"estimate": ("--preset", "exact", "--gpu", "rtx4090"), "plan": ("--gpu", "24GB"), "report": ()}
    for command, options in asked.items():
        result = run(command, str(model), *SIZES, *options, "--html", str(folder / command))
        assert result.exit_code == 0, result.output
        found[command] = (folder / command).read_text()
    return found


@needs_browser
@pytest.mark.parametrize("width, dark", ((360, True), (1200, False)), ids=("phone, dark", "desktop, light"))
@pytest.mark.parametrize("command", ("estimate", "plan", "report"))
def test_a_page_can_be_read(pages, tmp_path, command, dark, width):
    found = looked_at(pages[command], tmp_path, width, dark)
    assert found["dark"] == dark and not found["fetched"] and not found["errors"]
    assert found["width"] == width and not found["cut"] and not found["faint"]


def nbytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]


@needs_browser
def test_a_click_sorts_a_table(pages, tmp_path):
    """Bytes are sorted by size, whatever their units, and names by name. A second click reverses the order."""
    head, *before = looked_at(pages["estimate"], tmp_path, 1200, False)["tables"][-1]
    assert head == ["strategy", "part", "bytes"] and len(before) > 8
    sizes = [nbytes(row[2]) for row in before if row[0] == "stock"]
    assert sizes == sorted(sizes, reverse=True) and sizes
    for clicks, key, down in (
        (("bytes",), lambda row: nbytes(row[2]), True),
        (("bytes", "bytes"), lambda row: nbytes(row[2]), False),
        (("bytes", "part"), lambda row: row[1], False),
    ):
        found = looked_at(pages["estimate"], tmp_path, 1200, False, "".join(map(CLICK.format, clicks)))
        assert not found["errors"] and found["tables"][-1][0] == head
        keys = list(map(key, found["tables"][-1][1:]))
        assert keys == sorted(keys, reverse=down) and sorted(found["tables"][-1][1:]) == sorted(before)


def test_a_timeline_has_axes(pages):
    """Round numbers with their units, on the page's own background."""
    shown = re.search(r"<svg.*?</svg>", pages["report"], re.DOTALL)
    assert shown is not None and "svg { width: 100%; min-width: 36rem; }" in pages["report"]
    across, up = (re.findall(rf'<text class="{axis}"[^>]*>([^<]*)</text>', shown[0]) for axis in ("below", "beside"))
    assert across[-1] == "% of the time" and 3 <= len(across[:-1]) <= 7 and across[0] == "0"
    assert 3 <= len(up) <= 7 and up[0].split()[0] == "0" and len({text.split()[1] for text in up}) == 1
    steps = {round(b - a, 9) for a, b in pairwise(float(text.split()[0]) for text in up)}
    assert len(steps) == 1 and steps.pop() > 0


def test_without_its_script_a_page_shows_the_same(pages):
    for text in pages.values():
        shown, script = text.split("<script>")
        assert (
            ("Parts of the peak" in shown or "By module" in shown)
            and shown.count("<tr>") > 5
            and "<button" not in shown
        )
        assert "fetch(" not in script and "import" not in script


def test_no_text_of_a_model_becomes_markup():
    assert "<img" not in html_page("<img src=x onerror=alert(1)>", [])


def test_neighbours_that_are_alike_have_one_name():
    assert _several(["model.layers.3"]) == "model.layers.3"
    assert _several([f"model.layers.{i}" for i in range(3, 16)]) == "model.layers.3 .. 15"
