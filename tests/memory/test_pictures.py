"""Pictures show the data that they are given, and a page needs no other file."""

import io
import re
import struct
import sys
from html.parser import HTMLParser

import pytest

from hf_actcompress.display.html import HtmlSection, write_html
from hf_actcompress.display.pictures import draw_roles, draw_timelines
from hf_actcompress.display.tables import Table
from hf_actcompress.errors import MissingExtraError
from hf_actcompress.memory import BatchSizeReport, MemoryTimeline

GIB = 2**30
TIMELINE = MemoryTimeline((0.0, 0.1, 0.2, 0.3), (10 * 2**20, 30 * 2**20, 20 * 2**20, 0), (0.15, 0.25))
DRAWINGS = {
    "roles": lambda target: draw_roles({"stock": {"mlp": 3 * GIB, "norm": GIB}, "exact": {"mlp": GIB}}, target),
    "timelines": lambda target: draw_timelines({"stock": TIMELINE, "exact": TIMELINE}, target),
    "timeline": TIMELINE.plot,
}
every = pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)


@every
def test_is_a_png_of_some_size(draw, tmp_path):
    buffer = io.BytesIO()
    draw(buffer)
    assert buffer.getvalue()[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", buffer.getvalue()[16:24])
    assert width > 500 and height > 150
    draw(tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()


@every
def test_says_what_is_missing(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=re.escape("hf-actcompress[plot]")):
        draw(io.BytesIO())


def test_a_report_without_a_picture_says_so():
    with pytest.raises(NotImplementedError, match="a BatchSizeReport has no picture"):
        BatchSizeReport.plot(BatchSizeReport.__new__(BatchSizeReport), io.BytesIO())


def texts(draw, tmp_path, monkeypatch):
    """What is written in a picture."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(tmp_path / "picture.svg")
    found = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "picture.svg").read_text())
    return set(map(str.strip, found))


def test_names_roles_and_strategies(tmp_path, monkeypatch):
    found = texts(DRAWINGS["roles"], tmp_path, monkeypatch)
    assert {"stock", "exact", "mlp", "norm", "GiB kept for backward"} <= found


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["td"]:
            self.cells.append(data)


def test_a_page_needs_nothing_but_itself(tmp_path):
    table = Table(("role", "bytes"), [("<mlp> & co", "12")], numbers=("bytes",))
    section = HtmlSection("Kept", "first\nsecond", [table], curves={"<stock>": TIMELINE})
    path = tmp_path / "new" / "report.html"
    write_html(path, "A & B", [section])
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == [] and page.cells == ["<mlp> & co", "12"]
    assert page.links == [] and "&lt;stock&gt;" in text and "<svg" in text
    # one script, which is in the page and only sorts tables
    assert not re.search(r"https?:|@import|url\(|<script [^>]*src|<link", text) and text.count("<script") == 1
    assert "<title>A &amp; B</title>" in text and "<p>second</p>" in text
