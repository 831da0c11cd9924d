"""A tiny model config for the commands, and a separate folder of stored answers for each test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_actcompress.cli.cache import FOLDER

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64, "dtype": "bfloat16",
    "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture(autouse=True)
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored answers, which is another one for each test, so that no test reads another test's."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "answers"))
    return tmp_path / "answers" / "estimates"
