"""The formula compared with `estimate`, in Python and in the page's JavaScript, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.closed_form.probes import FAMILIES, HEAD, left_over, sizes_of
from hf_actcompress.memory.closed_form.symbols import Reader
from hf_actcompress.memory.estimation.meta_model import skeleton
from hf_actcompress.memory.estimation.quantized import QuantizedLinear
from hf_actcompress.quick import formula, page
from hf_actcompress.quick.config_rules import rules
from hf_actcompress.quick.formula import with_chunks
from hf_actcompress.quick.question import classes, question
from tests.browser import dom, looked_at, needs_browser
from tests.cli.invoke import run
from tests.quick.reference import FILE, MODES, PRESETS, STRATEGIES, estimated

HERE, RESOURCES = Path(__file__).parent, Path(page.__file__).parent / "resources"
CASES: list[dict[str, Any]] = json.loads(FILE.read_text())
WITHIN = 0.03
ROOM = 24 * 2**30
LLAMA = PRESETS["Llama-3.2-1B"]
ROBERTA = PRESETS["RoBERTa base (classification)"]
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node")


def named(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['mode']}-{case['strategy']}"


def answered(case: dict[str, Any]) -> formula.QuickEstimate:
    asked = question(PRESETS[case["model"]], **MODES[case["mode"]])
    return asked.answer(case["strategy"], case["batch_size"], case["seq_len"], case["optimizer"])


@pytest.mark.parametrize("case", CASES, ids=named)
def test_within_three_percent_of_the_estimate(case):
    found = answered(case)
    assert found.device_bytes == pytest.approx(case["device_bytes"], rel=WITHIN)
    assert found.kept_bytes == pytest.approx(case["kept_bytes"], rel=WITHIN, abs=2**20)


@pytest.mark.daily(40)
@pytest.mark.parametrize("case", CASES, ids=named)
def test_the_reference_is_what_the_estimate_says_today(case):
    for name, size in estimated(case).items():
        assert size == pytest.approx(case[name], rel=0.002), name


def test_every_class_and_strategy_has_a_reference():
    assert {PRESETS[case["model"]]["architectures"][0] for case in CASES} == set(classes())
    assert {case["strategy"] for case in CASES} == set(STRATEGIES) and len({case["model"] for case in CASES}) >= 20
    assert {case["mode"] for case in CASES} == set(MODES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_probe_s_chunks_are_those_of_the_formula(name):
    sizes = {"hidden": 7 * 8 * HEAD, **{size: known.value for size, known in sizes_of(FAMILIES[name], True).items()}}
    assert with_chunks(sizes) == sizes


def test_a_chunk_s_last_turn_is_not_taken_for_a_constant():
    """It has the rows that the turns before it leave over. A small batch has no such rest."""
    sizes = sizes_of(FAMILIES["Qwen2ForCausalLM"], grouped=True)
    tokens, rows, vocab = sizes["batch"].value * sizes["seq"].value, sizes["few_rows"].value, sizes["vocab"].value
    last, reader = tokens % rows, Reader(sizes, left_over(sizes))
    assert 0 < last < rows and Reader(sizes).read(last * vocab * 4)
    assert reader.read(last * vocab * 4) is None and reader.read(last * vocab * 2) is None
    assert reader.read(rows * vocab * 4) == Reader(sizes).read(rows * vocab * 4) != {}
    for name, data in classes().items():
        rows = [data["sums"][number] for step in data["steps"] for number in step["moments"]]
        terms = {pair for row in rows for pair in zip(row[::2], row[1::2], strict=True)}
        # the only terms of the vocabulary alone are biases and their gradients
        assert all(factor <= 32 for term, factor in terms if data["terms"][term] == {"vocab": 1}), name


REFUSED = {
    "class": ({"architectures": ["OtherForCausalLM"]}, {}, "no formula for OtherForCausalLM; known: "),
    "nothing": ({}, {}, "no formula for a config without"),
    "structure": ({**LLAMA, "attention_bias": True}, {}, "attention_bias"),
    "type": ({**LLAMA, "model_type": "nope"}, {}, "model_type"),
    "padding": ({**LLAMA, "pad_token_id": 999_999}, {}, "LlamaForCausalLM cannot be made from this config: Padding"),
    "padding beyond the positions": ({**ROBERTA, "pad_token_id": 600}, {}, "Padding_idx must be within"),
    "no padding for positions": ({**ROBERTA, "pad_token_id": None}, {}, "pad_token_id is"),
    "padding in the last position": ({**ROBERTA, "pad_token_id": -1}, {}, "positions for 0 tokens, and 128 were"),
    "late padding": ({**ROBERTA, "pad_token_id": 400}, {}, "positions for 113 tokens, and 128 were"),
    "no width of the MLP": ({**LLAMA, "intermediate_size": None}, {}, "intermediate_size"),
    "quantised": ({**LLAMA, "quantization_config": {"bits": 4}}, {}, "QLoRA"),
    "heads": ({**LLAMA, "num_key_value_heads": 7}, {}, "7 in this config, and should be a divisor of num_att"),
    "one head of keys": ({**LLAMA, "num_key_value_heads": 1}, {}, "several heads of keys"),
    "a width as text": ({**LLAMA, "intermediate_size": "8192"}, {}, "intermediate_size"),
    "a negative head": ({**LLAMA, "head_dim": -64}, {}, "head_dim"),
    "sizes": ({**LLAMA, "num_hidden_layers": 0}, {}, "num_hidden_layers"),
    "dtype": (LLAMA, {"dtype": "float32", "lora": True}, "no formula for weights in float32"),
    "long dtype": (LLAMA, {"dtype": "float64"}, "no formula for weights in float64"),
    "fp4": (LLAMA, {"quantization": "fp4", "lora": True}, "nf4"),
    "experts": ({**PRESETS["Mixtral-8x7B"], "num_local_experts": 0}, {}, "num_local_experts"),
    "dense layers": ({**PRESETS["Qwen3-30B-A3B"], "mlp_only_layers": [0]}, {}, "mlp_only_layers"),
    "layer types": ({**PRESETS["Gemma-3-4B"], "layer_types": ["full_attention"] * 34}, {}, "full attention in each 6"),
    "head": ({**PRESETS["GPT-2"], "n_head": 6}, {"dtype": "bf16"}, "heads of 64"),
    "positions": ({**PRESETS["GPT-2"], "n_positions": 64}, {"dtype": "bf16"}, "learned positions"),
    "reserved positions": ({**ROBERTA, "max_position_embeddings": 129}, {}, "127 tok"),
    "experts of a token": (
        {**PRESETS["Mixtral-8x7B"], "num_experts_per_tok": 20},
        {},
        "more and at most num_local_exp",
    ),
    "a share": ({**LLAMA, "attention_dropout": 3}, {}, "should be a number from 0 to 1: correct it there"),
    "one of a list": ({**LLAMA, "image_size": [32, 0]}, {}, "in this config, and should be a whole number from 1"),
    "a name": ({**LLAMA, "architectures": "Llama"}, {}, "should be a list of names"),
    "a dtype": ({**LLAMA, "dtype": "bf17"}, {}, "one of float32, bfloat16, float16, float64, fp32"),
    "bits": ({**LLAMA, "quantization_config": {"bits": "four"}}, {}, "one of 2, 3, 4, 8"),
    "a group": ({**LLAMA, "quantization_config": {"group_size": 0}}, {}, "from 1 to 2147483647 or -1"),
    "no object": ({**LLAMA, "quantization_config": "nf4"}, {}, "an object with options"),
    "a width": ({**LLAMA, "hidden_size": 2049}, {}, "for a width that 32 heads divide, not for 2049"),
    "odd heads": ({**LLAMA, "head_dim": 33}, {}, "heads of 33 here"),
    "odd experts": ({**PRESETS["Mixtral-8x7B"], "intermediate_size": 100}, {}, "multiples of 8, not 4096 and 100"),
    "a null head": ({**PRESETS["Qwen3-8B"], "head_dim": None}, {}, "head_dim above 0"),
    "no window": ({**PRESETS["Gemma-3-4B"], "sliding_window": None}, {}, "needs a sliding_window"),
    "no padding token": ({**ROBERTA, "pad_token_id": None}, {}, "state the padding token there"),
    "window": ({**PRESETS["Mixtral-8x7B"], "sliding_window": 128}, {}, "tokens back"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_does_not_know(name):
    config, training, message = REFUSED[name]
    with pytest.raises(ModelConfigError, match=message):
        question(config, **training).answer("exact", 2, 128)


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
        most = formula.largest(lambda b, c=case: answered({**c, "batch_size": b}).device_bytes, ROOM, 1024)
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
    peaks = [expected.answer(strategy, 4, 512).device_bytes for strategy in expected.strategies]
    assert [row[0] for row in llama["rows"]] == expected.strategies
    assert [row[1] for row in llama["rows"]] == [f"{peak / 2**30:.2f} GiB" for peak in peaks]
    compile(llama["code"], "the code to copy", "exec")
    assert 'patch_model(model, "exact")' in llama["code"]
    for shown, message in zip(refused, ("no formula for OtherForCausalLM", "no JSON", "JSON object"), strict=True):
        assert shown["hidden"] and message in shown["problem"]


@needs_browser
def test_a_browser_shows_it(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(page.page())
    shown = dom(path)
    asked = question(next(iter(PRESETS.values())), dtype="bf16")
    for strategy in asked.strategies:
        peak = asked.answer(strategy, 4, 512).device_bytes / 2**30
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


@needs_browser
@pytest.mark.parametrize("width, dark", ((360, True), (1200, False)), ids=("phone, dark", "desktop, light"))
def test_the_page_can_be_read(tmp_path, dark, width):
    found = looked_at(page.page(), tmp_path, width, dark)
    assert found["dark"] == dark and not found["fetched"] and not found["errors"]
    assert found["width"] == width and not found["cut"] and not found["faint"]


def test_the_command_answers_without_torch(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_actcompress.cli import app\n"
        f"sizes = ['--batch-size', '4', '--seq-len', '2048', '--gpu', 'rtx4090', '--max-context', '--json']\n"
        f"result = CliRunner().invoke(app, ['estimate', {str(path)!r}, '--quick', *sizes])\n"
        "assert result.exit_code == 0, result.output\nprint(result.stdout)\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["rows"]}
    asked = question(LLAMA)
    for strategy, row in rows.items():
        room, at = 24564 * 2**20, row["largest_batch_size"]
        assert row["peak_bytes"] == asked.answer(strategy, 4, 2048).device_bytes
        assert asked.answer(strategy, at, 2048).device_bytes <= room < asked.answer(strategy, at + 1, 2048).device_bytes
        longest = row["longest_sequences"]
        assert (
            asked.answer(strategy, 4, longest).device_bytes
            <= room
            < asked.answer(strategy, 4, longest + 64).device_bytes
        )


@pytest.mark.parametrize("padding", [0, 100, 120, 127, 129, 130, 200, 512, -1, -130, -131])
def test_a_padding_token_is_refused_as_the_estimate_refuses_it(tmp_path, padding):
    """RoBERTa's positions begin after the padding token, and that token has a row in both tables."""
    path = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
    sizes |= {"model_type": "roberta", "vocab_size": 512, "max_position_embeddings": 130, "pad_token_id": padding}
    path.write_text(json.dumps({**ROBERTA, **sizes}))
    asked = ("estimate", str(path), "--batch-size", "2", "--seq-len", "16")
    measured, quick = run(*asked, "--no-cache", "--preset", "exact"), run(*asked, "--quick")
    refusals = [[line for line in done.stderr.splitlines() if line.startswith("error: ")] for done in (measured, quick)]
    assert measured.exit_code == quick.exit_code and refusals[0] == refusals[1]
    assert bool(refusals[0]) == (padding not in (0, 100, -130))


def test_the_command_says_what_it_cannot(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": ["OtherForCausalLM"], "model_type": "other"}))
    unknown = run("estimate", str(path), "--quick")
    assert unknown.exit_code == 3 and "no formula for OtherForCausalLM" in unknown.stderr
    path.write_text(json.dumps(LLAMA))
    assert run("estimate", str(path), "--quick", "--engine", "compile").exit_code == 2
    assert run("estimate", str(path), "--quick", "--gpu", "1GiB").exit_code == 1


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["Mixtral-8x7B", "GPT-2", "Llama-3.2-1B", "Qwen2.5-7B"])
def test_the_share_of_packed_weights_is_that_of_the_estimate_s_model(name: str, quantization: str):
    config = PRESETS[name]
    asked = question(config, dtype="bf16", lora=8, quantization=quantization)
    model = skeleton(FAMILIES[config["architectures"][0]].config(**config), torch.bfloat16, 8, False, quantization)
    packed = sum(module.count for module in model.modules() if isinstance(module, QuantizedLinear))
    left = sum(p.numel() for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    assert asked.packed_share == pytest.approx(packed / (packed + left), abs=0.005)
    assert question(config, dtype="bf16").packed_share is None
