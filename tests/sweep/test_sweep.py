"""The sweep's command runs on pairs that were wrong once, and on a sample that changes every day.

Args (environment): SWEEP_SEED draws another sample than the day's; SWEEP_SECONDS makes it longer or shorter.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sweep import fallback

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("SWEEP_SEED", datetime.date.today().timetuple().tm_yday))
SECONDS = float(os.environ.get("SWEEP_SECONDS", "50"))

# what was wrong once: (pair, mode, what it was)
HISTORICAL = (
    (
        "deepseek_v32/DeepseekV32ForCausalLM",
        "eval",
        "the sparse mask was lost: model code asked for the attention's name",
    ),
    ("glm_moe_dsa/GlmMoeDsaForCausalLM", "eval", "the sparse mask was lost"),
    ("afmoe/AfmoeForCausalLM", "autocast", "an RMSNorm with fp32 weights and a bf16 input"),
    ("olmo2/Olmo2ForCausalLM", "autocast", "an RMSNorm that multiplies by its weight before it casts"),
    ("deepseek_v4/DeepseekV4ForCausalLM", "bf16", "an RMSNorm without weights, a clamped gated MLP"),
    ("bamba/BambaForCausalLM", "fp32", "an RMSNorm with a gate"),
    ("mamba2/Mamba2ForCausalLM", "fp32", "an RMSNorm with a gate"),
    ("beam/BeamForCausalLM", "bf16", "a gated MLP that computes in fp32"),
    ("swinv2/Swinv2ForImageClassification", "fp32", "a linear layer's output that is written in place"),
    ("data2vec-audio/Data2VecAudioForCTC", "fp32", "a linear layer's output that is written in place"),
    ("encoder-decoder/EncoderDecoderModel", "autocast", "a loss of bf16 logits that the outer model computes"),
    ("deepseek_v3/DeepseekV3ForCausalLM", "pad-left", "values of another width than keys, with a mask"),
    ("minicpm3/MiniCPM3ForCausalLM", "pad-right", "values of another width than keys, with a mask"),
)


def sweep(out: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows that the command writes. It runs in a process of its own, because it forks."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.sweep", "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    rows: list[dict[str, Any]] = json.loads((out / "sweep.json").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def historical(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each pair that is to be tested, in the mode in which it was wrong."""
    cases = [
        item.callspec.params for item in request.session.items if "historical" in getattr(item, "fixturenames", ())
    ]
    found: dict[str, dict[str, Any]] = {}
    for mode in sorted({case["mode"] for case in cases}):
        names = "|".join(re.escape(case["pair"]) for case in cases if case["mode"] == mode)
        rows = sweep(tmp_path_factory.mktemp(mode), "--only", f"^({names})$", "--modes", mode)
        found |= {f"{row['type']}/{row['model']}": row for row in rows}
    return found


@pytest.mark.daily(3)
@pytest.mark.parametrize(("pair", "mode", "what"), HISTORICAL, ids=lambda value: value if "/" in str(value) else "")
def test_what_was_wrong_once(historical: dict[str, dict[str, Any]], pair: str, mode: str, what: str) -> None:
    row = historical[pair]
    assert not row.get("skipped"), f"{pair} is not compared any more: {row['skipped']}"
    assert not row.get("failures"), f"{pair} ({what}): {row['failures']}"
    assert mode in row["passed"], f"{pair}: {mode} was left out: {row.get('left_out')}"


def test_a_sample_of_all_pairs(tmp_path: Path) -> None:
    """As many pairs as fit into the time, in an order drawn from the day of the year."""
    rows = sweep(tmp_path, "--sample", str(SEED), "--budget", str(SECONDS))
    compared = [row for row in rows if row.get("passed") or row.get("failures")]
    wrong = {f"{row['type']}/{row['model']}": row["failures"] for row in rows if row.get("failures")}
    print(f"SWEEP_SEED={SEED}: {len(compared)} of {len(rows)} pairs compared, {len(wrong)} with a failure")
    assert not wrong, f"SWEEP_SEED={SEED}: {json.dumps(wrong, indent=1)}"
    assert compared, f"SWEEP_SEED={SEED}: nothing was compared in {SECONDS} s"


def test_the_readmes_table_is_the_sweeps() -> None:
    readme = (Path(__file__).parents[2] / "hf_actcompress/models/README.md").read_text()
    table = readme.split("<!-- from tests/sweep/results/savings.md -->")[1].split("<!-- end -->")[0]
    lines = (Path(__file__).parent / "results" / "savings.md").read_text().splitlines()
    known = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    shares = {cells[0]: cells[2:5] for cells in known if len(cells) == 6}
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    assert len(rows) > 15
    for name, *said in rows:
        assert shares[name] == said, name


@pytest.mark.slow
def test_what_the_fallback_saves_is_what_is_stored() -> None:
    """CTRL's own layers are no layers to plans, so that its leaves save something."""
    rows = [json.loads(line) for line in (fallback.RESULTS / "fallback.jsonl").read_text().splitlines()]
    (stored,) = (row["kept"] for row in rows if row["class"] == "CTRLLMHeadModel")
    assert fallback.table(rows) == (fallback.RESULTS / "fallback.md").read_text()
    (pair,) = (pair for pair in fallback.chosen(len(rows), seed=1) if pair.model == "CTRLLMHeadModel")
    found = fallback.measured(pair)
    assert found == pytest.approx(stored, abs=0.01) and found["leaves"] > found["full"]
