"""Open a page in a real browser without a network and report what it shows, what cannot be read, and what clicks do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser")

# for each element with text: the contrast between the text and the background behind it, by WCAG's formula
_LOOK = """
const errors = [], frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, faint = [], cut = [];
  view.addEventListener("error", (event) => errors.push(event.message));
  const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (colour) => colour.slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = rgb(view.getComputedStyle(at).backgroundColor);
      if (found[3] !== 0) return found;
    }
    return [255, 255, 255];
  };
  const scrolls = (element) => element
    && (/auto|scroll/.test(view.getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  for (const element of page.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || /^(SCRIPT|STYLE|OPTION)$/.test(element.tagName)) continue;
    const shades = [light(rgb(view.getComputedStyle(element).color)), light(ground(element))].sort((a, b) => b - a);
    const text = element.textContent.trim().slice(0, 40);
    if ((shades[0] + 0.05) / (shades[1] + 0.05) < 4.5) faint.push(text);
    if (element.getBoundingClientRect().right > view.innerWidth + 1 && !scrolls(element)) cut.push(text);
  }
  CLICKS
  document.title = JSON.stringify({
    dark: view.matchMedia("(prefers-color-scheme: dark)").matches, width: page.documentElement.scrollWidth, faint, cut,
    errors, fetched: view.performance.getEntriesByType("resource").map((entry) => entry.name),
    tables: [...page.querySelectorAll("table")].map(
      (table) => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent))),
  });
};
"""


def dom(path: Path, dark: bool = False, fragment: str = "") -> str:
    """The document after its scripts have run; `fragment` stands behind the # of its address."""
    assert BROWSER is not None
    address = f"{path.as_uri()}#{fragment}"
    # preferredColorScheme: 0 is dark, 1 is light
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={path.parent / 'profile'}",
               f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1300,1000",
               "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", address]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def looked_at(html: str, folder: Path, width: int, dark: bool, clicks: str = "") -> dict[str, Any]:
    """Open the page in a frame of that width and report what it looks like.

    Args:
        html: The page.
        folder: The temporary files are written here.
        width: In pixels.
        dark: Whether the system prefers a dark colour scheme.
        clicks: JavaScript that is run on the document `page`, after colours and positions were checked.

    Returns:
        dark: whether the page sees that a dark scheme is preferred; width: the width of its content in pixels; faint:
        texts with too little contrast; cut: texts beyond the right edge that no scrolling reaches; errors: messages of
        script errors; fetched: addresses that the page loaded; tables: the texts of each table's cells.
    """
    path = folder / "frame.html"
    frame = f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{escape(html)}"></iframe>'
    path.write_text(
        f"<!doctype html><meta charset=utf-8><title></title>{frame}<script>{_LOOK.replace('CLICKS', clicks)}</script>"
    )
    title = re.search(r"<title>(.*?)</title>", dom(path, dark), re.DOTALL)
    assert title is not None and title[1], "the page was not looked at"
    found: dict[str, Any] = json.loads(unescape(title[1]))
    return found
