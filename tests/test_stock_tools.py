"""What other tools and habits do with a patched model: traces, tensors of inference mode, training in eval mode."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from hf_actcompress import CompressionConfig, patch_model
from hf_actcompress.memory.measurement.allocator import kept_bytes
from tests.families import BY_NAME, FAMILIES

CONFIGS: dict[str, Any] = {"plans": "exact", "leaf by leaf": CompressionConfig(plans=False), "long": "long"}
pytestmark = pytest.mark.filterwarnings("ignore")


def _trained(name: str, config: Any, **options: Any) -> Any:
    model = BY_NAME[name].build(**options)
    if config is not None:
        patch_model(model, config)
    output = model(**BY_NAME[name].make_batch())
    (output[0] if isinstance(output, tuple) else output.loss).backward()
    return model.eval()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_a_traced_model_is_that_of_stock(name: str, config: str) -> None:
    ids = BY_NAME[name].make_batch()["input_ids"]
    results, codes = [], []
    for made in (None, CONFIGS[config]):
        file = io.BytesIO()
        traced = torch.jit.trace(_trained(name, made, return_dict=False), (ids,), check_trace=False)
        torch.jit.save(traced, file)
        file.seek(0)
        results.append(torch.jit.load(file)(ids)[0])
        codes.append(str(traced.inlined_graph).count("aten::"))
    assert torch.equal(*results) and codes[0] == codes[1]


def _of_features(name: str, config: Any) -> dict[str, Any]:
    family = BY_NAME[name]
    model = family.build()
    if config is not None:
        patch_model(model, config)
    batch = family.make_batch("right" if "right" in family.paddings else "none")
    labels = batch.pop("labels")
    with torch.inference_mode():
        # a frozen tower or a cache of features
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
        batch = {key: x.clone() for key, x in batch.items()}
    model(**batch, labels=labels).loss.backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.task == "causal"])
@pytest.mark.daily(4)
def test_tensors_of_inference_mode_are_taken(name: str, config: str) -> None:
    try:
        stock = _of_features(name, None)
    except RuntimeError as error:
        pytest.skip(f"stock refuses them: {error}")
    torch.testing.assert_close(_of_features(name, CONFIGS[config]), stock, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("labels", [True, False])
def test_a_training_in_eval_mode_keeps_no_logits(labels: bool) -> None:
    """Dropout that is switched off by eval mode, as in reinforcement learning and distillation."""
    kept = []
    for train in (True, False):
        model = patch_model(BY_NAME["llama"].build(vocab_size=4096).train(train))
        batch = BY_NAME["llama"].make_batch()
        target = batch.pop("labels")

        def loss(model: Any = model, batch: Any = batch, target: Any = target) -> Any:
            if labels:
                return model(**batch, labels=target).loss
            logits = model(**batch).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.clamp(min=0).flatten())

        loss().backward()
        model.zero_grad()
        kept.append(kept_bytes(loss, "cpu"))
    assert kept[1] <= 1.05 * kept[0]


def test_patched_modules_are_no_stock_modules_in_a_table_of_types() -> None:
    """FSDP2 looks the class that it makes for a module up in such a table."""
    stock, patched = BY_NAME["llama"].build(), patch_model(BY_NAME["llama"].build())
    assert type(patched.model.layers[0]) not in {type(stock.model.layers[0]): 0}
    assert type(patched.lm_head) not in {nn.Linear: 0} and isinstance(patched.lm_head, nn.Linear)
