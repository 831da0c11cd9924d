"""From what an estimate can be made, what it must not change, and what it says if it cannot load a model."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
import torch
import transformers as hf
from peft import LoraConfig

from hf_actcompress import CompressionConfig, kept_bytes, measure_step, patch_model, patch_report
from hf_actcompress.errors import ModelConfigError, UnknownOptionError
from hf_actcompress.memory import Estimate, estimate
from hf_actcompress.memory.estimation.states.optimizers import optimizer_rule
from hf_actcompress.patching import _say_once
from tests.families import BY_NAME, FAMILIES

BERT = BY_NAME["bert"].make_config()
SIZES = {"batch_size": 2, "seq_len": 32}


def test_the_parts_add_up_and_serialise(capsys):
    found = estimate(BERT, **SIZES)
    assert isinstance(found, Estimate)
    assert sum(size for _, size in found.rows()) == found.device_bytes
    assert found.total_peak_bytes == found.weights_bytes + found.gradients_bytes + found.optimizer_bytes + (
        found.step_peak_bytes
    )
    data = json.loads(found.to_json())
    assert data["total_peak_bytes"] == found.total_peak_bytes and data["kept_by_role"] == found.kept_by_role
    found.print()
    assert "weights" in capsys.readouterr().out


def test_a_config_a_folder_a_file_and_the_model_say_the_same(tmp_path):
    model = BY_NAME["bert"].build()
    model.config.save_pretrained(tmp_path)
    (tmp_path / "other.json").write_text((tmp_path / "config.json").read_text())
    options = {**SIZES, "device": "cpu"}
    expected = estimate(model, **options)
    for source in (model.config, str(tmp_path), tmp_path / "config.json", str(tmp_path / "other.json")):
        assert estimate(source, **options) == expected


@pytest.mark.daily(3)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family(family):
    model = family.build()
    b, s = 2, 7  # the length of the seq2seq labels
    found = estimate(model, batch_size=b, seq_len=s, config="exact", device="cpu")
    batch = {key: value[:b] for key, value in family.make_batch().items()}
    if family.task != "image":
        ids = torch.randint(3, 67, (b, s))
        batch = {"input_ids": ids, "labels": ids}
    patch_model(model)
    kept = kept_bytes(lambda: model(**batch), "cpu")
    model(**batch).loss.backward()
    peak = measure_step(lambda: model(**batch).loss.backward(), "cpu").peak_bytes
    print(found.kept_bytes / kept, found.step_peak_bytes / peak)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.05)


def test_layers_of_two_kinds_in_turn():
    options = {
        "vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": 1, "sliding_window": 16, "use_cache": False, "num_hidden_layers": 10,
    }  # fmt: skip
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**options)).train()
    found = estimate(model, **SIZES, config="stock", device="cpu")
    ids = torch.randint(3, 67, (2, 32))
    assert found.kept_bytes == pytest.approx(kept_bytes(lambda: model(input_ids=ids, labels=ids), "cpu"), rel=0.01)


@pytest.mark.parametrize("config", ["stock", "exact"])
def test_a_vocabulary_of_many_chunks(config):
    """An estimate runs only the first chunks of logits and the last one."""
    options = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=20000, **options)).train()
    found = estimate(model, batch_size=2, seq_len=128, config=config, device="cpu")
    ids = torch.randint(3, 20000, (2, 128))
    if config != "stock":
        patch_model(model, config)
    kept = kept_bytes(lambda: model(input_ids=ids, labels=ids), "cpu")
    model(input_ids=ids, labels=ids).loss.backward()
    peak = measure_step(lambda: model(input_ids=ids, labels=ids).loss.backward(), "cpu").peak_bytes
    print(found.kept_bytes, kept, found.step_peak_bytes, peak)
    assert found.kept_bytes == pytest.approx(kept, rel=0.01)
    assert found.step_peak_bytes == pytest.approx(peak, rel=0.03)


def test_a_module_is_left_as_it_was():
    model = patch_model(BY_NAME["llama"].build(), "int8").eval()
    report, before = patch_report(model), copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    stock = estimate(model, **SIZES, config=None)
    assert estimate(model, **SIZES, config="exact").kept_bytes < stock.kept_bytes
    assert patch_report(model) == report and not model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
    assert all(p.grad is None and type(p) is torch.nn.Parameter for p in model.parameters())


def test_nothing_is_said_of_a_lossy_preset_before_it_is_used(caplog):
    model = BY_NAME["llama"].build()
    # the message is logged once per process
    _say_once.cache_clear()
    estimate(model, **SIZES, config=CompressionConfig(mlp="int2"))
    assert not caplog.records
    patch_model(model, CompressionConfig(mlp="int2"))
    assert "lossy" in caplog.text


def test_frozen_parameters_have_no_gradients():
    model = BY_NAME["bert"].build()
    for p in model.bert.embeddings.parameters():
        p.requires_grad_(False)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert estimate(model, **SIZES, device="cpu").gradients_bytes == trained


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("adamw", lambda ps: torch.optim.AdamW(ps, fused=True)),
        ("sgd", torch.optim.SGD),
        ("sgd_momentum", lambda ps: torch.optim.SGD(ps, momentum=0.9)),
        ("adafactor", lambda ps: hf.Adafactor(ps, lr=1e-3, relative_step=False)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_states_are_those_of_the_optimizer(name, make, dtype):
    model = BY_NAME["bert"].build(dtype)
    optimizer = make(list(model.parameters()))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    states = (x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    expected = sum(x.nbytes for x in states)
    assert estimate(model, **SIZES, optimizer=name, device="cpu").optimizer_bytes == expected


@pytest.mark.parametrize(
    ("name", "cuda", "make"),
    [
        ("adamw", False, lambda ps: torch.optim.AdamW(ps, fused=True)),
        ("adamw_torch", False, lambda ps: torch.optim.AdamW(ps, foreach=False)),
        ("adamw_torch", True, lambda ps: torch.optim.AdamW(ps, foreach=True)),
        ("sgd_momentum", True, lambda ps: torch.optim.SGD(ps, momentum=0.9, foreach=True)),
        ("adafactor", False, lambda ps: hf.Adafactor(ps, lr=1e-3, relative_step=False, scale_parameter=False)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(512, 512, 512), (1024, 256, 512), (256, 1024)])
def test_what_the_optimizers_own_step_takes(name, cuda, make, dtype, rows):
    parameters = [torch.nn.Parameter(torch.randn(n, 256, dtype=dtype)) for n in rows]
    optimizer = make(parameters)
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimizer.step()
    peak = measure_step(optimizer.step, "cpu").peak_bytes
    assert sum(optimizer_rule(name).step(parameters, cuda)) == pytest.approx(peak, rel=0.02, abs=4096)


def test_the_optimizers_step_counts_where_it_takes_more_than_the_backward():
    model = BY_NAME["bert"].build()
    # optimizer states are many times as large as the activations of so few tokens
    large, small = (
        estimate(model, batch_size=1, seq_len=4, optimizer=name, device="cuda") for name in ("adamw_torch", "adamw")
    )
    assert large.optimizer_step_bytes == large.gradients_bytes > small.optimizer_step_bytes == 0
    assert large.device_bytes - small.device_bytes == max(0, large.optimizer_step_bytes - large.step_peak_bytes)
    assert sum(size for _, size in large.rows()) == large.device_bytes
    assert estimate(model, batch_size=64, seq_len=16, optimizer="adamw_torch").device_bytes == (
        estimate(model, batch_size=64, seq_len=16, optimizer="adamw").device_bytes
    )


def test_weights_are_counted_once_if_they_are_tied():
    model = BY_NAME["gpt2-gelu-new"].build()
    tensors = [*model.parameters(), *model.buffers()]
    assert estimate(model, **SIZES, device="cpu").weights_bytes == sum(x.nbytes for x in tensors)


def test_lora_by_rank_and_by_config():
    config = BY_NAME["llama"].make_config()
    by_rank = estimate(config, **SIZES, lora=8, dtype="bfloat16")
    assert by_rank == estimate(config, **SIZES, lora=LoraConfig(r=8, target_modules="all-linear"), dtype=torch.bfloat16)
    plain = estimate(config, **SIZES, dtype="bfloat16")
    assert by_rank.gradients_bytes == by_rank.weights_bytes - plain.weights_bytes
    assert by_rank.model == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "adamm"}, {"device": "tpu"}, {"config": "int3"}, {"dtype": "int8"}],
)
def test_unknown_options_are_named(options):
    with pytest.raises(UnknownOptionError, match="known"):
        estimate(BERT, **SIZES, **options)


def test_a_model_that_cannot_be_had(tmp_path, monkeypatch):
    with pytest.raises(ModelConfigError, match="no such file"):
        estimate(tmp_path / "nothing", **SIZES)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelConfigError, match="model_type"):
        estimate(str(tmp_path), **SIZES)

    def refuse(*args, **kwargs):
        raise OSError(said)

    monkeypatch.setattr(hf.AutoConfig, "from_pretrained", refuse)
    said = "We couldn't connect to the hub"
    with pytest.raises(ModelConfigError, match="path to a config.json"):
        estimate("someone/some-model", **SIZES)
    said = "You are trying to access a gated repo."
    with pytest.raises(ModelConfigError, match="auth login"):
        estimate("someone/some-model", **SIZES)


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(ModelConfigError, match="labels"):
        estimate(hf.BertModel(BERT), **SIZES)


def test_an_8b_model_in_seconds_and_little_memory():
    code = """
import sys, time
from pathlib import Path
from transformers import LlamaConfig
from hf_actcompress.memory import estimate
config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                     num_key_value_heads=8, vocab_size=128256)
start = time.process_time()
found = estimate(config, batch_size=4, seq_len=2048, dtype="bfloat16")
# not `ru_maxrss`, which a new process takes over from its parent: this one counts from the start of the program
kilobytes = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(time.process_time() - start, kilobytes, found.weights_bytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    seconds, kilobytes, weights = map(float, done.stdout.split()[-3:])
    print(f"{seconds:.1f} s of CPU time, {kilobytes / 2**20:.2f} GiB")
    assert kilobytes < 2 * 2**20
    assert weights > 8e9 * 2
