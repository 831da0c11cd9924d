"""The page computes what the formula computes, and a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

from hf_actcompress.quick import formula, page
from hf_actcompress.quick.cards import CARDS
from hf_actcompress.quick.config_rules import rules
from hf_actcompress.quick.question import classes, question
from hf_actcompress.quick.strategies import STRATEGIES, recommended
from tests.browser import dom, looked_at, needs_browser
from tests.cli.invoke import run
from tests.quick.cases import CASES, LLAMA, REFUSED, WITHIN, answered, named
from tests.quick.reference import MODES, PRESETS

HERE, RESOURCES = Path(__file__).parent, Path(page.__file__).parent / "resources"
ROOM = 24 * 2**30
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


@needs_node
def test_the_page_computes_the_same():
    """This compares every case and every refusal."""
    questions = [
        {
            "config": PRESETS[case["model"]], "training": MODES[case["mode"]], "strategy": case["strategy"],
            "batch": case["batch_size"], "seq": case["seq_len"], "optimizer": case["optimizer"], "room": ROOM,
        }
        for case in CASES
    ]  # fmt: skip
    common = {"strategy": "exact", "batch": 2, "seq": 128, "optimizer": "adamw", "room": ROOM}
    refused = [{"config": config, "training": training, **common} for config, training, _ in REFUSED.values()]
    text = json.dumps({"classes": classes(), "rules": rules(), "questions": questions + refused})
    command = ["node", str(HERE / "run.js"), str(RESOURCES / "formula.js")]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    for case, there in zip(CASES, answers, strict=False):
        here = answered(case)
        assert there["kept_by_role"].keys() == here.kept_by_role.keys()
        for part in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "step_peak_bytes", "device_bytes"):
            assert there[part] == pytest.approx(getattr(here, part), abs=8), named(case)
        falls = formula.tiles_from(case["seq_len"])
        most = formula.largest(lambda b, c=case: answered({**c, "batch_size": b}).device_bytes, ROOM, 1024, falls)
        assert there["largest"] == most
    for there, (_, _, message) in zip(answers[len(CASES) :], REFUSED.values(), strict=True):
        assert message in there["error"]


def test_the_page_is_one_file_that_fetches_nothing(tmp_path):
    path = tmp_path / "page.html"
    assert run("page", "--out", str(path)).exit_code == 0
    text = path.read_text()
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert text.count("</script>") == 3 and "/*" + "DATA*/" not in text


@needs_node
def test_what_the_page_shows(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page.page())
    pasted = [json.dumps(LLAMA), '{"architectures": ["OtherForCausalLM"]}', "{", "[]"]
    done = subprocess.run(
        ["node", str(HERE / "view.js"), str(path), *pasted], capture_output=True, text=True, check=True
    )
    first, llama, *refused = json.loads(done.stdout)
    assert not first["hidden"] and not first["problem"]
    expected = question(LLAMA, dtype="bf16")
    peaks = [expected.answer(strategy, 1, 2048).device_bytes for strategy in expected.strategies]
    assert [row[0] for row in llama["rows"]] == expected.strategies
    assert [row[1] for row in llama["rows"]] == [f"{peak / 2**30:.2f} GiB" for peak in peaks]
    compile(llama["code"], "the code to copy", "exec")
    # the row to start with is that of the command, and the code is its code
    known = [(row[0], STRATEGIES[row[0]], row[3]) for row in llama["rows"]]
    start = recommended(known)
    assert start is not None and llama["start"] == f"Start with {start}."
    assert f'patch_model(model, "{STRATEGIES[start].config}")' in llama["code"]
    assert [row[6:] for row in llama["rows"]] == [[row[1].time, row[1].gradients] for row in known]
    # only what fits can be chosen
    assert llama["choices"] == [row[0] for row in llama["rows"] if row[3] != "no"]
    for shown, message in zip(refused, ("no formula for OtherForCausalLM", "no JSON", "JSON object"), strict=True):
        assert shown["hidden"] and message in shown["problem"]


@needs_browser
def test_a_browser_shows_it(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page.page())
    shown = dom(path)
    # the first view shows a reason to care: QLoRA of an 8B on 12 GB
    asked = question(PRESETS["Llama-3.1-8B"], dtype="bf16", lora=8, quantization="nf4")
    room = CARDS["rtx3060"] * 2**20
    sizes = {name: asked.answer(name, 1, 2048).device_bytes for name in asked.strategies}
    assert sizes["stock"] > room and any(size < room for size in sizes.values())
    for strategy in asked.strategies:
        peak = sizes[strategy] / 2**30
        assert f'<th scope="row">{strategy}</th><td class="number">{peak:.2f} GiB</td>' in shown


# pastes each config, chooses what is asked, and adds a table of what the page then shows
_ASK = """
  const set = (id, value, event) => {
    page.getElementById(id).value = value;
    page.getElementById(id).dispatchEvent(new view.Event(event, { bubbles: true }));
  };
  const answers = page.body.appendChild(page.createElement("table"));
  for (const { config, training, optimizer, batch, seq, strategy } of CASES) {
    set("config", config, "input");
    for (const [id, value] of Object.entries({ training, optimizer, batch, seq, rank: 16 })) set(id, value, "change");
    const row = [...page.getElementById("rows").rows].find((row) => row.cells[0].textContent === strategy);
    const problem = page.getElementById("problem").textContent;
    answers.insertRow().insertCell().textContent = problem || row.cells[1].textContent;
  }
"""


@needs_browser
def test_a_browser_computes_what_the_estimate_says(tmp_path):
    asked = [
        {
            "config": json.dumps(PRESETS[case["model"]]), "training": case["mode"], "optimizer": case["optimizer"],
            "batch": case["batch_size"], "seq": case["seq_len"], "strategy": case["strategy"],
        }
        for case in CASES
    ]  # fmt: skip
    # the text of a script must not hold a closing tag
    clicks = _ASK.replace("CASES", json.dumps(asked).replace("</", "<\\/"))
    found = looked_at(page.page(), tmp_path, 1200, False, clicks)
    assert not found["errors"]
    for (shown,), case in zip(found["tables"][-1], CASES, strict=True):
        size, unit = shown.split(" ")
        # the page shows two decimals
        expected = case["device_bytes"] / 2**30
        assert unit == "GiB" and float(size) == pytest.approx(expected, rel=WITHIN, abs=0.005), named(case)


# enters all fields, and adds a table with the address of the link
_ENTER = """
  const entered = FIELDS;
  for (const [id, value] of Object.entries(entered)) {
    page.getElementById(id).value = value;
    page.getElementById(id).dispatchEvent(new view.Event(id === "config" ? "input" : "change", { bubbles: true }));
  }
  const row = page.body.appendChild(page.createElement("table")).insertRow();
  for (const text of [page.getElementById("link").href, page.getElementById("title").textContent]) {
    row.insertCell().textContent = text;
  }
"""
ENTERED = {
    "config": json.dumps({**LLAMA, "name": 'a "b" & <c>#d'}), "card": "another size", "gigabytes": "40.5", "batch": "3",
    "seq": "640", "training": "lora", "rank": "24", "optimizer": "sgd", "strategy": "checkpointing",
}  # fmt: skip


@needs_browser
def test_an_address_shows_what_was_entered(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page.page())
    found = looked_at(page.page(), tmp_path, 1200, False, _ENTER.replace("FIELDS", json.dumps(ENTERED)))
    assert not found["errors"]
    ((address, title),) = found["tables"][-1]
    fragment = address.partition("#")[2]
    kept = dict(parse_qsl(fragment))
    assert kept == {**ENTERED, "preset": "as pasted"} and "batch 3 × 640 on 40.5 GB" in title
    again = dom(path, fragment=fragment)
    code = re.search(r'<pre id="code"[^>]*>(.*?)</pre>', again, re.DOTALL)
    assert f">{title}</h2>" in again and code is not None
    assert "r=24" in code[1] and "batch_size=3" in code[1] and "gradient_checkpointing=True" in code[1]
    # the address says it again, so that it can be passed on
    link = re.search(r'<a id="link" href="#([^"]*)"', again)
    assert link is not None and dict(parse_qsl(unescape(link[1]))) == kept
    # without an address, and with one that says nothing: the first view
    for fragment in ("", "card=none&batch=x&training=none&strategy=none&other=1"):
        assert "batch 1 × 2048 on rtx3060</h2>" in dom(path, fragment=fragment)


@needs_browser
@pytest.mark.parametrize("width, dark", ((360, True), (360, False), (1200, True), (1200, False)))
def test_the_page_can_be_read(tmp_path, dark, width):
    # no column is out of sight: gradients are the last one
    cut = "const box = page.querySelector('.scroll'); if (box.scrollWidth > box.clientWidth) errors.push('it scrolls');"
    found = looked_at(page.page(), tmp_path, width, dark, cut)
    assert found["dark"] == dark and not found["fetched"] and not found["errors"]
    assert found["width"] == width and not found["cut"] and not found["faint"]
