"""The recipes that measure: they run, write what they say, and the figures in the files are the ones printed."""

import importlib
import json
from pathlib import Path

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
    options = ["--quick", "--models", "llama", "--rounds", "1", "--out", str(tmp_path)]
    assert importlib.import_module("benchmark").main(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "benchmark.jsonl").read_text().splitlines()]
    kept = {row["variant"]: row["kept_h"] for row in rows}
    assert kept["exact"] < 0.6 * kept["stock"] and kept["checkpointing"] < kept["exact"]
    assert all(row["correct"] and row["step_ms"] > 0 for row in rows)
    assert f"{kept['exact']:.2f}" in (tmp_path / "benchmark.md").read_text()


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
