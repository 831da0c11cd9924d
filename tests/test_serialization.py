"""Files that a patched model writes are read in a fresh interpreter, with this package and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hf_actcompress import patch_model
from tests.families import BODY, BY_NAME, Family, step

ROOT = Path(__file__).parents[1]
NAMES = ("bert", "gpt2-gelu-tanh", "llama")
three = pytest.mark.parametrize("name", NAMES)

_LOAD = """
import sys, torch
folder, *names = sys.argv[1:]
# the layers first: nothing but they say here that our attention function has to be registered
for name in names:
    layer, x, kwargs, expected = torch.load(f"{folder}/{name}-layer.pt", weights_only=False)
    y = layer(x, **kwargs)
    assert torch.equal(y[0] if isinstance(y, tuple) else y, expected)
models = [torch.load(f"{folder}/{name}.pt", weights_only=False) for name in names]
from hf_actcompress import patch_report
from tests.families import BY_NAME, differing, step
for name, model in zip(names, models):
    assert patch_report(model).patched
    loss, grads = step(model, BY_NAME[name].make_batch("right"))
    expected_loss, expected = torch.load(f"{folder}/{name}-step.pt")
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)
"""

_FROM_PRETRAINED = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
folder, *names = sys.argv[1:]
for name in names:
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model, info = auto.from_pretrained(f"{folder}/{name}", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    for module in model.modules():
        assert "ActCompress" not in type(module).__name__ and "actcompress" not in repr(vars(module).keys())
    torch.save(model(**torch.load(f"{folder}/{name}-inputs.pt")).logits, f"{folder}/{name}-logits.pt")
assert not any(name.split(".")[0] == "hf_actcompress" for name in sys.modules)
"""


def _run(code: str, folder: Path) -> None:
    """Run the code in a fresh interpreter, with as many threads as here: sums of several threads round differently."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(folder), *NAMES]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_torch_save_loads_in_a_fresh_interpreter(tmp_path: Path) -> None:
    for name in NAMES:
        model = patch_model(BY_NAME[name].build(torch.bfloat16), BODY)
        torch.save(model, tmp_path / f"{name}.pt")
        torch.save(step(model, BY_NAME[name].make_batch("right")), tmp_path / f"{name}-step.pt")
        layer = next(m for m in model.float().modules() if isinstance(m, nn.ModuleList))[0]
        x = torch.randn(2, 5, 32)
        kwargs = {"position_embeddings": (torch.ones(1, 5, 8), torch.zeros(1, 5, 8))} if name == "llama" else {}
        y = layer(x, **kwargs)
        torch.save((layer, x, kwargs, (y[0] if isinstance(y, tuple) else y).detach()), tmp_path / f"{name}-layer.pt")
    _run(_LOAD, tmp_path)


@three
def test_save_pretrained_writes_the_same_files(name: str, tmp_path: Path) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    model = BY_NAME[name].build()
    model.save_pretrained(stock)
    patch_model(model).save_pretrained(ours)
    assert sorted(p.name for p in ours.iterdir()) == sorted(p.name for p in stock.iterdir())
    for path in stock.glob("*.json"):
        assert (ours / path.name).read_text() == path.read_text()
    with safe_open(ours / "model.safetensors", "pt") as a, safe_open(stock / "model.safetensors", "pt") as b:
        keys = list(b.keys())
        assert list(a.keys()) == keys and a.metadata() == b.metadata()
        assert all(torch.equal(a.get_tensor(key), b.get_tensor(key)) for key in keys)


def test_stock_from_pretrained_in_a_process_without_us(tmp_path: Path) -> None:
    expected = {}
    for name in NAMES:
        model = patch_model(BY_NAME[name].build())
        model.save_pretrained(tmp_path / name)
        batch = BY_NAME[name].make_batch("right")
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        torch.save(inputs, tmp_path / f"{name}-inputs.pt")
        expected[name] = model.eval()(**inputs).logits
    _run(_FROM_PRETRAINED, tmp_path)
    for name in NAMES:
        assert torch.equal(torch.load(tmp_path / f"{name}-logits.pt"), expected[name])


@three
def test_weights_load_both_ways(name: str) -> None:
    """A stock state_dict loads into a patched model, and a patched model's loads into a stock one."""
    family: Family = BY_NAME[name]
    model, stock = patch_model(family.build(seed=1)), family.build(seed=2)
    model.load_state_dict(stock.state_dict())
    assert torch.equal(step(model, family.make_batch())[0], step(stock, family.make_batch())[0])
    other = family.build(seed=3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(step(other, family.make_batch())[0], step(stock, family.make_batch())[0])
