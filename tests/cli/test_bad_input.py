"""What a user may get wrong is one line and a status of its own; the words that users know are understood."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
import torch

from hf_actcompress.cli.common import Exit
from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory import estimate, max_batch_size, max_seq_len, plan
from hf_actcompress.memory.estimation import model_copies
from hf_actcompress.memory.estimation.states.optimizers import optimizer_rule
from hf_actcompress.quick.cards import CARDS, card_bytes
from tests.cli.invoke import SIZES, run

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 101, "hidden_size": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
OPT = {
    "model_type": "opt", "architectures": ["OPTForCausalLM"], "vocab_size": 101, "hidden_size": 32, "ffn_dim": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 40, "word_embed_proj_dim": 32,
}  # fmt: skip

T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 101, "d_model": 32, "d_kv": 8,
    "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip


def written(folder: Any, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


CONFIGS: dict[str, tuple[Any, str]] = {
    "a number as text": ({**LLAMA, "hidden_size": "32"}, "hidden_size"),
    "half a number": ({**LLAMA, "hidden_size": 32.5}, "hidden_size"),
    "nothing": ({**LLAMA, "intermediate_size": None}, "intermediate_size"),
    "no layers": ({**LLAMA, "num_hidden_layers": -2}, "num_hidden_layers is -2 in this config, and should be"),
    "no width": ({**LLAMA, "hidden_size": 0}, "hidden_size is 0 in this config, and should be"),
    "heads that do not divide": ({**LLAMA, "num_attention_heads": 5}, "a divisor of num_attention_heads (5)"),
    "padding beyond the vocabulary": ({**LLAMA, "pad_token_id": 5000}, "adding_idx"),
    "a negative vocabulary": ({**LLAMA, "vocab_size": -5}, "vocab_size is -5 in this config, and should be"),
    "an unknown activation": ({**LLAMA, "hidden_act": "nope"}, "KeyError 'nope'"),
    "an unknown type": ({**LLAMA, "model_type": "nope"}, "nope"),
    "no first token": ({**T5, "decoder_start_token_id": None}, "the config has to state decoder_start_token_id"),
    "no buckets": ({**T5, "relative_attention_num_buckets": 0}, "relative_attention_bias.weight would be empty"),
    "an unknown dense activation": ({**T5, "feed_forward_proj": "gated-nope"}, "KeyError 'nope'"),
    "a list": ([1, 2], "model_type"),
    "half a file": ("{", "JSON"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_cannot_be_used(name: str, tmp_path: Any) -> None:
    config, said = CONFIGS[name]
    path = written(tmp_path, config)
    result = run("estimate", path, *SIZES, "--preset", "exact")
    assert result.exit_code == Exit.NO_MODEL, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0], lines
    result = run("plan", path, *SIZES, "--gpu", "24")
    assert result.exit_code == Exit.NO_MODEL, result.output
    assert re.fullmatch(f"planning {path}\nerror: [^\n]+\n", result.stderr), result.stderr
    result = run("estimate", path, *SIZES, "--quick")
    assert result.exit_code == Exit.NO_MODEL, result.output
    assert re.fullmatch("error: [^\n]+\n", result.stderr), result.stderr


@pytest.mark.parametrize(("config", "most"), [(BERT, 512), (OPT, 40)], ids=["bert", "opt"])
def test_sequences_longer_than_the_positions(config: Any, most: int, tmp_path: Any) -> None:
    path = written(tmp_path, config)
    assert estimate(path, batch_size=1, seq_len=most, device="cpu").kept_bytes > 0
    for call in (estimate, plan):
        with pytest.raises(ModelConfigError, match=f"positions for {most} tokens, and {most + 1} were asked for"):
            call(path, batch_size=1, seq_len=most + 1, device="cpu", **({"budget": "1GB"} if call is plan else {}))
    result = run("estimate", path, "--seq-len", str(most + 1), "--preset", "exact")
    assert result.exit_code == Exit.NO_MODEL and str(most) in result.stderr


def test_rotary_positions_have_no_end(tmp_path: Any) -> None:
    path = written(tmp_path, {**LLAMA, "max_position_embeddings": 16})
    assert estimate(path, batch_size=1, seq_len=64, device="cpu").kept_bytes > 0


@pytest.mark.parametrize("dtype", ["float32", "fp16", "bf16"])
def test_experts_in_every_dtype(dtype: str, tmp_path: Any) -> None:
    """torch knows the shape of a grouped product for bf16 alone."""
    path = written(tmp_path, MIXTRAL)
    found = estimate(path, batch_size=2, seq_len=16, dtype=dtype, device="cpu")
    wide = estimate(path, batch_size=2, seq_len=16, dtype="bfloat16", device="cpu")
    assert found.kept_bytes == pytest.approx(wide.kept_bytes * (2 if dtype == "float32" else 1), rel=0.2)


WRITING = (("plan", "--out"), ("plan", "--html"), ("estimate", "--html"), ("report", "--html"), ("page", "--out"))


@pytest.mark.parametrize(("command", "option"), WRITING)
def test_a_file_that_cannot_be_written_is_said_first(
    command: str, option: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = () if command == "page" else (written(tmp_path, LLAMA), *SIZES)

    def said(path: Any) -> str:
        result = run(command, *given, f"{option}={path}")
        assert result.exit_code == Exit.USAGE, result.output
        assert re.fullmatch(f"error: Invalid value for {option}: [^\n]+\n", result.stderr), result.stderr
        return result.stderr

    assert "there is no folder" in said(tmp_path / "no" / "file")
    assert "it is a folder; give the name of a file in it" in said(tmp_path)
    assert "File name too long" in said(tmp_path / ("x" * 300))
    (tmp_path / "file").touch()
    assert "Not a directory" in said(tmp_path / "file" / "below")
    assert "there is no folder" in said("~nobody_of_that_name/file")
    # a superuser may write anywhere
    monkeypatch.setattr(os, "access", lambda place, mode: mode != os.W_OK)
    assert f"no permission to write to {tmp_path};" in said(tmp_path / "new")
    assert f"no permission to write to {tmp_path / 'file'};" in said(tmp_path / "file")


def test_files_at_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "=" a shell leaves the ~ to the command."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = written(tmp_path, LLAMA)
    options = (*SIZES, "--gpu", "24", "--allow", "checkpoint", "--out=~/plan.json", "--html=~/plan.html")
    for command in (("page", "--out=~/page.html"), ("plan", model, *options)):
        result = run(*command)
        assert result.exit_code == Exit.OK, result.output
    assert all((tmp_path / name).stat().st_size for name in ("page.html", "plan.json", "plan.html"))


@pytest.mark.parametrize("command", [("estimate",), ("estimate", "--quick"), ("plan", "--gpu", "24"), ("report",)])
def test_a_name_that_no_file_can_have(command: tuple[str, ...]) -> None:
    result = run(command[0], "x" * 300, *command[1:])
    assert result.exit_code == Exit.NO_MODEL and result.stderr.splitlines()[-1].startswith("error: "), result.output
    assert "Traceback" not in result.stderr and "config.json" in result.stderr


def test_a_disk_that_is_full_is_one_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the check, and outside of any computation."""

    def fails(*given: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", fails)
    result = run("page", "--out", str(tmp_path / "page.html"))
    assert result.exit_code == Exit.FAILED
    assert result.stderr == "error: OSError: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    "words",
    [
        ("estimat", "MODEL"),
        ("estimate",),
        ("estimate", "MODEL", "--batch-size", "-1"),
        ("estimate", "MODEL", "--gpu", "rtx99"),
        ("estimate", "MODEL", "--gpu", "9" * 400),
        ("plan", "MODEL", "--gpu", "9" * 400),
        ("estimate", "MODEL", "--batch-size", "9" * 30),
        ("plan", "MODEL", "--gpu", "24", "--seq-len", "9" * 400),
        ("estimate", "MODEL", "--lora-r", "9" * 30),
        ("estimate", "MODEL", "--fsdp", "9" * 30),
        ("estimate", "MODEL", "--lora-r", "0"),
        ("estimate", "MODEL", "--quick", "--dtype", "bf17"),
        ("estimate", "MODEL", "--zero", "3"),
        ("plan", "MODEL", "--nothing"),
        ("plan", "MODEL", "--gpu", "24", "--device", "tpu"),
        ("plan", "MODEL", "--dtype", ""),
        ("estimate", "MODEL", "--dtype", ""),
        ("page", "--out", "no/such/page.html"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_what_is_called_wrongly_is_one_line(words: tuple[str, ...], tmp_path: Any) -> None:
    model = written(tmp_path, {**LLAMA, "num_attention_heads": 2})
    result = run(*(model if word == "MODEL" else word for word in words))
    assert result.exit_code == Exit.USAGE, result.output
    said = result.stderr.removeprefix(f"planning {model}\n" if "--device" in words else "")
    assert re.fullmatch("error: [^\n]+\n", said), result.stderr


def test_what_nobody_expected_is_one_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any, **more: Any) -> None:
        raise RuntimeError("a step\nthat fails")

    monkeypatch.setattr(model_copies, "run_again", fails)
    options = ("estimate", written(tmp_path, LLAMA), *SIZES, "--preset", "exact")
    result = run(*options)
    assert result.exit_code == Exit.FAILED and result.stderr.strip() == "error: RuntimeError: a step that fails"
    monkeypatch.setenv("ACTCOMPRESS_TRACEBACK", "1")
    assert isinstance(run(*options).exception, RuntimeError)


SIZED = {"24": 24e9, "24G": 24e9, "24 GB": 24e9, "22GiB": 22 * 2**30, "0.5g": 0.5e9, "512MiB": 2**29}
NAMED = {
    "rtx4090": "rtx4090", "RTX 4090": "rtx4090", "4090": "rtx4090", "NVIDIA GeForce RTX 3090": "rtx3090",
    "Tesla T4": "t4", "A100-80GB": "a100-80gb", "a100 80gb": "a100-80gb", "H100": "h100", "rtx-4090": "rtx4090",
    "rtx 4070 super": "rtx4070super", "4070 ti super": "rtx4070tisuper", "rtx3060-12gb": "rtx3060",
    "rtx3080-12gb": "rtx3080-12gb", "RTX 3080 10GB": "rtx3080", "RTX 4090 Laptop GPU": "rtx4090-laptop",
    "b200": "b200", "AMD Instinct MI300X": "mi300x", "NVIDIA A100-SXM4-40GB": "a100", "Tesla V100-SXM2-16GB": "v100",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA RTX 6000 Ada Generation": "rtx6000ada", "NVIDIA H200": "h200",
}  # fmt: skip


def test_cards_by_name_and_by_size() -> None:
    for text, nbytes in SIZED.items():
        assert card_bytes(text) == nbytes, text
    for text, name in NAMED.items():
        assert card_bytes(text) == CARDS[name] * 2**20, text
    for text in ("rtx99", "", "-24", "0", "24 apples", "9" * 400, f"{2**63}B"):
        with pytest.raises(ValueError, match="size"):
            card_bytes(text)
    # a name has no second meaning
    assert len({name.replace("-", "") for name in CARDS}) == len(CARDS)


@pytest.mark.parametrize(
    ("text", "near"), [("rtx4070 supr", "rtx4070super"), ("rtx4080sup", "rtx4080super"), ("mi300", "mi300x")]
)
def test_a_card_that_is_not_known_gets_the_nearest_names(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"the nearest are .*\b{near}\b"):
        card_bytes(text)
    result = run("estimate", "none.json", "--gpu", text)
    assert result.exit_code == Exit.USAGE and near in result.stderr


def test_the_library_takes_the_names_of_cards(tmp_path: Any) -> None:
    sizes: dict[str, Any] = {"dtype": "bfloat16", "seq_len": 16}
    config = written(tmp_path, LLAMA)
    assert max_seq_len(config, batch_size=1, budget="4060 ti", dtype="bfloat16", limit=128) == 128
    by_name, by_bytes = (max_batch_size(config, budget=budget, **sizes) for budget in ("t4", CARDS["t4"] * 2**20))
    assert by_name == by_bytes > 1000
    assert plan(config, batch_size=1, budget="t4", **sizes).budget_bytes == CARDS["t4"] * 2**20
    with pytest.raises(ValueError, match="rtx4090"):
        plan(config, batch_size=1, budget="rtx409", **sizes)


def test_mixed_precision_and_other_words(tmp_path: Any) -> None:
    """`TrainingArguments(bf16=True)` over weights in fp32, as most people train."""
    model = written(tmp_path, LLAMA)
    command = ("estimate", model, *SIZES, "--preset", "exact", "--json")

    def found(*options: str) -> Any:
        result = run(*command, *options)
        assert result.exit_code == Exit.OK, result.output
        return next(row["estimate"] for row in json.loads(result.stdout)["rows"] if row["preset"] == "exact")

    mixed = estimate(model, batch_size=2, seq_len=16, dtype=torch.float32, autocast=torch.bfloat16)
    assert found("--bf16")["kept_bytes"] == mixed.kept_bytes
    assert found("--bf16")["weights_bytes"] == found("--dtype", "fp32")["weights_bytes"] == mixed.weights_bytes
    assert found("--dtype", "bf16") == found("--dtype", "bfloat16")
    assert found("--lora-r", "4") == found("--lora", "--lora-rank", "4")
    assert found("--optim", "paged_adamw_8bit") == found("--optimizer", "adamw_8bit")
    assert run(*command, "--bf16", "--fp16").exit_code == Exit.USAGE
    assert optimizer_rule("adamw_torch_fused") is optimizer_rule("adamw")


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
print("run")
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_repository_runs_only_if_it_is_trusted(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"}
    folder = tmp_path / "own"
    folder.mkdir()
    given = {**LLAMA, "model_type": "own_llama", "architectures": ["OwnModel"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(given))
    (folder / "own_code.py").write_text(OWN_CODE)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for command in ("estimate", "plan"):
        result = run(command, str(folder), *SIZES, "--gpu", "24GB")
        assert result.exit_code == Exit.NO_MODEL and "--trust-remote-code" in result.stderr, result.output
        # nobody was asked, and nothing was run
        assert "[y/N]" not in result.output and "run" not in result.stdout
    result = run("estimate", str(folder), *SIZES, "--preset", "exact", "--trust-remote-code")
    assert result.exit_code == Exit.OK and result.stdout.startswith("run"), result.output
    # rows are counted where no spinner is seen
    assert "exact: 2 of 2" in result.stderr
