"""Configs that cannot be used are refused by every command in one line, before torch is imported."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest

from hf_actcompress.cli.common import Exit
from hf_actcompress.cli.flags import QUANTIZATIONS
from hf_actcompress.cli.process import only_our_words
from hf_actcompress.memory.estimation.quantized.formats import FORMATS
from tests.cli.invoke import SIZES, run
from tests.quick.test_config_rules import FAMILIES, LLAMA, changed

COMMANDS = (("estimate",), ("estimate", "--quick"), ("plan", "--gpu", "24"), ("report",))
WITHOUT_TORCH = """
import json, sys
from typer.testing import CliRunner
from hf_actcompress.cli import app
found = []
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words)
    found.append([result.exit_code, result.stderr])
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
print(json.dumps(found))
"""
ROBERTA = {
    "model_type": "roberta", "architectures": ["RobertaForMaskedLM"], "vocab_size": 101, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 1, "intermediate_size": 48, "max_position_embeddings": 66,
}  # fmt: skip


def written(folder: Any, config: Any, name: str = "config.json") -> str:
    path = folder / name
    path.write_text(json.dumps(config))
    return str(path)


def test_all_commands_refuse_a_broken_config_before_torch(tmp_path: Any) -> None:
    broken = (
        ("llama", "num_key_value_heads", 3),
        ("t5", "num_heads", 0),
        ("mixtral", "num_experts_per_tok", 20),
        ("llama", "quantization_config.bits", "four"),
        ("llama", "architectures", "LlamaForCausalLM"),
    )
    asked, fields = [], []
    for number, (family, field, value) in enumerate(broken):
        path = written(tmp_path, changed(FAMILIES[family], field, value), f"{number}.json")
        asked += [[command[0], path, *SIZES, *command[1:]] for command in COMMANDS]
        fields += [field] * len(COMMANDS)
    code = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(asked)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (status, said), words, field in zip(json.loads(done.stdout), asked, fields, strict=True):
        first = {"plan": f"planning {words[1]}\n", "report": f"measuring {words[1]}\n"}.get(words[0], "")
        assert status == Exit.NO_MODEL, (words, said)
        assert re.fullmatch(f"{first}error: {re.escape(field)} is [^\n]+ in this config, and should be [^\n]+\n", said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quant_method": "gptq", "bits": None}, "the quantization_config cannot be used"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": 3}, "the quantization_config cannot be used"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only", "quant_type_kwargs": 3}, "cannot be used"),
    ],
)
def test_options_of_a_quantisation_that_cannot_be_read(options: Any, said: str, tmp_path: Any) -> None:
    result = run("estimate", written(tmp_path, {**LLAMA, "quantization_config": options}), *SIZES, "--lora")
    assert result.exit_code == Exit.NO_MODEL and said in result.stderr, result.output
    assert re.fullmatch("error: [^\n]+\n", result.stderr)


def test_a_padding_token_that_is_null(tmp_path: Any) -> None:
    """RoBERTa counts positions from it. Other models do without."""
    path = written(tmp_path, {**ROBERTA, "pad_token_id": None})
    for more in ((), ("--quick",)):
        result = (
            run("estimate", path, *SIZES, "--preset", "exact") if not more else run("estimate", path, *SIZES, *more)
        )
        assert result.exit_code == Exit.NO_MODEL, result.output
        assert re.fullmatch("error: [^\n]*pad_token_id is (null|None)[^\n]+state the padding[^\n]+\n", result.stderr)
    assert run("estimate", written(tmp_path, {**LLAMA, "pad_token_id": None}), *SIZES, "--quick").exit_code == Exit.OK


def test_a_weight_without_elements(tmp_path: Any) -> None:
    """The table allows none, because DeBERTa has no types of tokens; a BERT with an empty table cannot run."""
    config = {**ROBERTA, "model_type": "bert", "architectures": ["BertForMaskedLM"], "type_vocab_size": 0}
    result = run("estimate", written(tmp_path, config), *SIZES, "--preset", "exact")
    assert result.exit_code == Exit.NO_MODEL
    assert "token_type_embeddings.weight would be empty; correct its sizes" in result.stderr


def test_a_model_that_peft_has_no_lora_for(tmp_path: Any) -> None:
    config = {"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 64, "hidden_size": 32}
    result = run("estimate", written(tmp_path, {**config, "num_hidden_layers": 1}), *SIZES, "--lora")
    assert result.exit_code == Exit.NO_MODEL
    assert re.fullmatch("error: peft puts no LoRA on a MambaForCausalLM: [^\n]+\n", result.stderr), result.stderr


@pytest.mark.parametrize("command", COMMANDS[:3])
def test_an_unknown_quantisation_is_a_wrong_call(command: tuple[str, ...], tmp_path: Any) -> None:
    result = run(command[0], written(tmp_path, LLAMA), *SIZES, *command[1:], "--quantization", "int3")
    assert result.exit_code == Exit.USAGE
    assert result.stderr == "error: unknown quantization 'int3'; known: 'nf4', 'fp4', 'int8'\n"
    assert set(QUANTIZATIONS) == set(FORMATS)


def test_other_libraries_are_silent_while_a_command_runs(
    tmp_path: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def remarks() -> None:
        warnings.warn("of a library", UserWarning, stacklevel=1)
        logging.getLogger("bitsandbytes").error("of a library")

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with only_our_words():
            remarks()
        assert not seen and not capfd.readouterr().err
        remarks()
        assert len(seen) == 1
        monkeypatch.setenv("ACTCOMPRESS_TRACEBACK", "1")
        with only_our_words():
            remarks()
        assert len(seen) == 2
    monkeypatch.undo()
    # peft warns about the layers of GPT-2
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = run("estimate", written(tmp_path, config), *SIZES, "--preset", "exact", "--lora", "--no-cache")
    assert result.exit_code == Exit.OK and not seen
    assert result.stderr == "stock: 1 of 2\nexact: 2 of 2\n"
