"""Put the texts of the README files into the pages of the site, with their links. Run by mkdocs; needs nothing else.

A page says what it takes, on lines of their own: `<!-- include from FILE -->` is the text of a file before its first
section, `<!-- include from FILE: SECTION -->` the text of a section, `<!-- include all of FILE -->` the text without
its title, and `<!-- include cells of FILE -->` the cells of a notebook with their outputs.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs"
TAKEN = re.compile(r"^<!-- include (from|all of|cells of) ([^\s:]+)(?:: (.+))? -->$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:)([^)#\s]+)\)")
# a README that prose names without a link
NAMED = re.compile(r"(?<!\[)`((?:[\w.-]+/)*[\w.-]+\.md)`(?!\])")


def sections(text: str) -> dict[str, str]:
    """The text under each heading of the second level; that before the first one, without the title, is under ""."""
    hidden = FENCE.sub(lambda fence: re.sub("^##", "xx", fence[0], flags=re.MULTILINE), text)
    starts = [(match.start(), match.end(), match[1]) for match in re.finditer(r"^## (.+)$", hidden, re.MULTILINE)]
    ends = [start for start, _, _ in starts] + [len(text)]
    title = re.match(r"# .+\n", text)
    found = {"": text[title.end() if title else 0 : ends[0]].strip()}
    return found | {name: text[end:stop].strip() for (_, end, name), stop in zip(starts, ends[1:], strict=True)}


def cells(text: str) -> str:
    """The cells of a notebook as Markdown, each code cell followed by what it printed."""
    shown = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        shown.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        shown += [f"```text\n{''.join(output['text'])}```" for output in cell.get("outputs", ())]
    return "\n\n".join(shown)


def taken() -> Iterator[tuple[str, str, str, str]]:
    """What each page takes: the page, the kind, the file, and the section ("" for none)."""
    for page in sorted(PAGES.rglob("*.md")):
        for match in TAKEN.finditer(page.read_text()):
            yield page.relative_to(PAGES).as_posix(), match[1], match[2], match[3] or ""


def homes() -> dict[str, str]:
    """The page of each file: the one that has its beginning."""
    return {file: page for page, _, file, section in taken() if not section}


def place(target: str, file: str) -> str:
    """A path in the text of a file, from the root of the checkout; "" if nothing is there."""
    bases = (posixpath.dirname(file), "", "hf_actcompress")
    paths = (posixpath.normpath(posixpath.join(base, target)) for base in bases)
    return next((path for path in paths if (ROOT / path).exists()), "")


def copied() -> set[str]:
    """Files that the texts link to and that are no pages: pictures, and tables of results."""
    known = homes()
    targets = {
        place(match[3], file)
        for file in {file for _, kind, file, _ in taken() if kind != "cells of"}
        for match in LINK.finditer(FENCE.sub("", (ROOT / file).read_text()))
    }
    return {path for path in targets - known.keys() if (ROOT / path).is_file()}


def relinked(text: str, file: str, page: str) -> str:
    """The text of a file with its links as they are on a page. A folder has no page: its name is shown.

    Raises:
        ValueError: A link leads to nothing.
    """
    known = homes()

    def shown(path: str) -> str:
        return posixpath.relpath(known.get(path, path), posixpath.dirname(page) or ".")

    def link(match: re.Match[str]) -> str:
        path = place(match[3], file)
        if not path:
            raise ValueError(f"{file} links to {match[3]}, which does not exist: mend the link in {file}")
        if (ROOT / path).is_dir():
            return f"`{path}`"
        return f"{match[1]}[{match[2]}]({shown(path)})"

    def named(match: re.Match[str]) -> str:
        path = place(match[1], file)
        return f"[{match[0]}]({shown(path)})" if path in known and known[path] != page else match[0]

    parts = re.split(f"({FENCE.pattern})", text, flags=FENCE.flags)
    parts[::2] = [NAMED.sub(named, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)


def filled(text: str, page: str) -> str:
    """A page with the texts that it takes.

    Raises:
        ValueError: A file has no such section.
    """

    def text_of(match: re.Match[str]) -> str:
        kind, file, section = match[1], match[2], match[3] or ""
        source = (ROOT / file).read_text()
        if kind == "cells of":
            return cells(source)
        if kind == "all of":
            return relinked(re.sub(r"\A# .+\n", "", source), file, page)
        found = sections(source)
        if section not in found:
            raise ValueError(f"docs/{page} takes the section {section!r} of {file}, which has {', '.join(found)}")
        return relinked(found[section], file, page)

    return TAKEN.sub(text_of, text)


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of the site: adds those that the texts link to."""
    from mkdocs.structure.files import File

    for path in sorted(copied()):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return filled(markdown, page.file.src_uri)
