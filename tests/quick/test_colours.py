"""Pages and pictures take their colours from one table."""

from __future__ import annotations

import re

from hf_actcompress.display.html import HtmlBars, HtmlSection, html_page
from hf_actcompress.display.pictures import draw_roles
from hf_actcompress.memory.estimation.result import Estimate
from hf_actcompress.quick.colours import COLOURS, EXACT, LOSSY, OTHERS, STOCK, part_colours, way_colour
from hf_actcompress.quick.page import page
from hf_actcompress.roles import Role

# these are whole-model options, and no row of a report has them
OPTIONS = {Role.CUDA_GRAPH, Role.PADDING, Role.SHARED_PROMPTS}


def light(colour: str) -> float:
    """WCAG's relative luminance."""
    shades = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shades)
    return sum(c * part for c, part in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_each_part_and_role_has_a_colour_of_its_own():
    assert {role.value for role in set(Role) - OPTIONS} <= COLOURS.keys()
    assert len(set(COLOURS.values())) == len(COLOURS)
    found = Estimate(
        "Llama", "cuda", 1, 8, "exact", "eager", 4, 4, 8, 2, {"norm": 2}, 1, 2, 4, 1, optimizer_step_bytes=8
    )
    assert {name.removeprefix("kept: ") for name, _ in found.rows()} <= COLOURS.keys()


def test_a_name_without_a_colour_gets_one_that_is_free():
    found = part_colours(["kept: norm", "offload/exact", "norm", "int8"])
    assert found["kept: norm"] == found["norm"] == COLOURS["norm"]
    assert len({found["norm"], found["int8"], found["offload/exact"]}) == 3
    assert len(part_colours(map(str, range(99)))) == 99


def test_curves_can_be_seen_on_light_and_dark_pages():
    names = {"stock": STOCK, "exact": EXACT, "int8, seed 1": LOSSY, "exact+checkpointing": EXACT, "liger": OTHERS}
    assert {name: way_colour(name) for name in names} == names
    for colour in (STOCK, OTHERS, EXACT, LOSSY):
        for ground in ("#ffffff", "#161616"):
            dark, bright = sorted(map(light, (colour, ground)))
            assert (bright + 0.05) / (dark + 0.05) >= 3, (colour, ground)


def test_pages_and_pictures_have_the_same_colours(tmp_path):
    bars = {"stock": {"norm": 2, "attention": 1}}
    html = html_page("", [HtmlSection("", bars=[HtmlBars(bars)])])
    for role in bars["stock"]:
        assert f'background:{COLOURS[role]}"></span>{role}' in html
    draw_roles(bars, tmp_path / "roles.svg")
    assert {COLOURS[role] for role in bars["stock"]} <= set(
        re.findall("#[0-9a-f]{6}", (tmp_path / "roles.svg").read_text())
    )
    # the page has the table itself, and no colour of its own
    data, _, view = page().partition("// The form of the page")
    assert f'"weights":"{COLOURS["weights"]}"' in data and not re.search('"#[0-9a-f]{6}', view)
