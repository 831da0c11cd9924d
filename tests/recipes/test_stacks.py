"""The examples of other libraries' stacks: a patched model trains as stock does there, and keeps less."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actcompress import kept_bytes

FOLDER = Path(__file__).parents[2] / "recipes" / "stacks"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("accelerate")
pytest.importorskip("peft")
# what an example needs, how far its losses may be from stock's, and which share of stock's bytes it keeps at most.
# The losses of QLoRA differ by the roundings of bf16, those of the others by sums in fp32 in another order.
EXAMPLES = {
    "accelerate_loop": ("accelerate", 1e-5, 0.55),
    "trl_sft_qlora": ("bitsandbytes", 2e-3, 0.55),
    "trl_dpo": ("trl", 1e-5, 0.65),
    "sentence_transformers_loss": ("sentence_transformers", 1e-5, 0.60),
    # the adapters keep their own inputs, and of frozen layers stock keeps little
    "diffusers_lora": ("diffusers", 1e-5, 0.80),
    "vision_language_lora": ("sklearn", 1e-5, 0.75),
}


@pytest.fixture(autouse=True)
def _folder_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in ("tiny", *(path.stem for path in FOLDER.glob("*.py"))):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_trains_as_stock_and_keeps_less(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, tolerance, share = EXAMPLES[name]
    pytest.importorskip(library)
    if name.startswith("trl"):
        pytest.importorskip("trl")
    example = importlib.import_module(name)
    results: list[Any] = []
    monkeypatch.setattr(example.tiny, "report", lambda *result: results.append(result))
    common = ["--steps", "3", "--batch-size", "2"]
    assert example.main([*common, "--stock", "--output-dir", str(tmp_path / "stock")]) == 0
    # the second run gets its model as a path, the folder of the first one
    model = next((tmp_path / "stock").glob("tiny-*"))
    assert example.main([*common, "--model", str(model), "--output-dir", str(tmp_path / "patched")]) == 0
    (stock, stock_kept), (losses, kept) = results
    assert len(losses) == 3 and losses == pytest.approx(stock, rel=tolerance)
    assert losses[0] != losses[-1]
    assert 0 < kept <= share * stock_kept


def test_the_vision_language_model_learns_from_its_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss falls, its tower gets no adapters, and another picture gives another loss."""
    pytest.importorskip("sklearn")
    example = importlib.import_module("vision_language_lora")
    args = example.tiny.parse("", ["--output-dir", str(tmp_path)], "smolvlm")
    losses, _ = example.train(args)
    assert len(losses) == 20 and sum(losses[-5:]) < 0.75 * sum(losses[:5])
    transformers = importlib.import_module("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(args.model).train()
    batch = next(example.batches(args, model.config))
    seen = model(**batch).loss
    assert model(**{**batch, "pixel_values": batch["pixel_values"].flip(-1)}).loss != seen
    config = importlib.import_module("peft").LoraConfig(r=8, target_modules=example.TARGETS)
    adapted = importlib.import_module("peft").get_peft_model(model, config)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * 2 and not any("vision_model" in name for name in trained)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 85


def _axolotl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Axolotl's class of plugins. If Axolotl is not installed, a class with the hooks that are used (as of 0.19)."""
    if importlib.util.find_spec("axolotl") is not None:
        return
    hooks = {"get_input_args": lambda self: None, "post_model_load": lambda self, cfg, model: None}
    base = types.ModuleType("axolotl.integrations.base")
    base.BasePlugin = type("BasePlugin", (), hooks)  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)


def test_the_plugin_of_axolotl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as Axolotl calls it: the class by its name, then the hook with a config and a model with adapters."""
    pytest.importorskip("pydantic")
    _axolotl(monkeypatch)
    module = importlib.import_module("axolotl_plugin")
    plugin = module.ActCompressPlugin()
    folder, _, arguments = plugin.get_input_args().rpartition(".")
    keys = getattr(importlib.import_module(folder), arguments)
    ids = torch.arange(64).view(2, 32)
    kept, losses = [], []
    for preset in (None, "exact"):
        model = _with_lora(importlib.import_module("tiny").tiny_model(tmp_path, "llama"))
        config = Namespace(**keys(actcompress_preset=preset).model_dump())
        plugin.post_model_load(config, model)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
        kept.append(kept_bytes(lambda model=model: model(input_ids=ids, labels=ids).loss, "cpu"))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert 0 < kept[1] < 0.7 * kept[0]


def _with_lora(folder: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    return get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
