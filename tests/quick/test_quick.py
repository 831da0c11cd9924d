"""The formula compared with `estimate`, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from hf_actcompress.errors import ModelConfigError
from hf_actcompress.memory.closed_form.probes import FAMILIES, HEAD, left_over, probe, sizes_of
from hf_actcompress.memory.closed_form.symbols import Reader
from hf_actcompress.memory.estimation.meta_model import skeleton
from hf_actcompress.memory.estimation.quantized.model import QuantizedLinear
from hf_actcompress.modules.tiled import rows_of_tiles
from hf_actcompress.quick import formula
from hf_actcompress.quick.formula import with_chunks
from hf_actcompress.quick.question import classes, question
from tests.cli.invoke import run
from tests.quick.cases import CASES, LLAMA, REFUSED, ROBERTA, WITHIN, answered, named
from tests.quick.reference import MODES, PRESETS, STRATEGIES, estimated


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


@pytest.mark.parametrize("tokens", [1, 8_191, 8_192, 16_383, 16_384, 20_000, 24_575, 24_576, 131_072])
def test_the_formula_has_the_tiles_of_the_layers(tokens):
    assert formula.tile_of({"batch": 1, "seq": tokens}).get("tile", 0) == rows_of_tiles(tokens)
    assert (tokens >= formula.tiles_from(1)) == bool(rows_of_tiles(tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_probe_s_chunks_are_those_of_the_formula(name):
    sizes = {"hidden": 7 * 16 * HEAD, **{size: known.value for size, known in sizes_of(FAMILIES[name], True).items()}}
    assert with_chunks(sizes) == sizes


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "MixtralForCausalLM"])
def test_no_weight_of_a_probe_is_taken_for_a_chunk_s_last_turn(name):
    family = FAMILIES[name]
    for grouped in family.grouped:
        model = skeleton(probe(name, next(iter(family.flavours)), grouped, 2), torch.float32, 37, False)
        sizes = {weight.numel() for weight in model.parameters()}
        skipped = left_over(sizes_of(family, grouped))
        assert not [size for size in sizes for itemsize in (1, 2, 4, 8) if size * itemsize in skipped]


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


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_it_does_not_know(name):
    config, training, message = REFUSED[name]
    with pytest.raises(ModelConfigError, match=message):
        question(config, **training).answer("exact", 2, 128)


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
