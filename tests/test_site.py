"""The pages of the documentation site take every section of the README files once. Needs no mkdocs."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter

import pytest

from tests.documents import DOCUMENTS, ROOT

SPEC = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/hooks.py")
hooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hooks)
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
# its links are the site's navigation
LEFT_OUT = {("README.md", "Read on")}


def test_the_navigation_names_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    assert sorted(re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)) == PAGES


def test_every_section_is_on_one_page() -> None:
    found = Counter()
    for _, kind, file, section in hooks.taken():
        if kind != "cells of":
            names = hooks.sections((ROOT / file).read_text()) if kind == "all of" else [section]
            found.update((file, name) for name in names)
    wanted = {(str(path.relative_to(ROOT)), name) for path in DOCUMENTS for name in hooks.sections(path.read_text())}
    assert found == Counter(wanted - LEFT_OUT)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_filled_and_its_links_lead_to_pages(page: str) -> None:
    text = hooks.filled((ROOT / "docs" / page).read_text(), page)
    assert not hooks.TAKEN.search(text)
    known = {(ROOT / "docs" / name).resolve() for name in {*PAGES, *hooks.copied()}}
    links = [match[3] for match in hooks.LINK.finditer(hooks.FENCE.sub("", text))]
    assert not [link for link in links if (ROOT / "docs" / page).parent.joinpath(link).resolve() not in known]


def test_a_section_that_no_file_has_is_refused() -> None:
    with pytest.raises(ValueError, match="takes the section 'Nothing' of README.md, which has"):
        hooks.filled("<!-- include from README.md: Nothing -->", "index.md")


def test_cells_are_shown_with_what_they_print() -> None:
    output = {"output_type": "stream", "text": ["2\n"]}
    code = {"cell_type": "code", "source": ["print(1 + 1)"], "outputs": [output]}
    notebook = {"cells": [{"cell_type": "markdown", "source": ["# Sum"]}, code]}
    assert hooks.cells(json.dumps(notebook)) == "# Sum\n\n```python\nprint(1 + 1)\n```\n\n```text\n2\n```"
