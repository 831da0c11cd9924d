"""What a compiled model keeps per token and layer, in units of the hidden size h (bf16): absolute bars."""

from __future__ import annotations

import pytest
import torch

from hf_actcompress import patch_model
from tests.integration.compiling import kept_by, one_graph
from tests.slopes import VOCAB, bert, gpt2, llama

pytestmark = pytest.mark.daily(5)

BATCH, LENGTH = 2, 256
BUILDERS = {"llama": llama, "gpt2": gpt2, "bert": bert}
EXACT = {"llama": 23.5, "gpt2": 20.5, "bert": 20.5}
OTHERS = {"int8": 12.5, "int4": 7.8, "checkpointed": 2.1}
# this backend keeps the bits of the masks of two dropouts per layer. Inductor, for which the bars are, keeps seeds
MASKS = {"llama": 0.0, "gpt2": 2 / 8, "bert": 2 / 8}
BARS = [*((name, "exact", bar) for name, bar in EXACT.items())]
BARS += [(name, how, bar) for name in BUILDERS for how, bar in OTHERS.items()]


def _slope(name: str, how: str, hidden: int) -> float:
    """Of three layers and two: the first layer is a special case, as its input is the embeddings."""
    ids = torch.randint(3, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    kept = []
    for layers in (2, 3):
        torch._dynamo.reset()
        model = BUILDERS[name](layers, hidden).to(torch.bfloat16).train()
        if how == "checkpointed":
            model.config.use_cache = False  # or transformers logs, which cannot be traced
            model.gradient_checkpointing_enable()
        patch_model(model, "exact" if how == "checkpointed" else how)
        kept.append(kept_by(one_graph(model), {"input_ids": ids, "labels": ids}))
    return (kept[1] - kept[0]) / (BATCH * LENGTH * hidden)


@pytest.mark.parametrize(("name", "how", "bar"), BARS)
def test_kept_per_token_and_layer(name: str, how: str, bar: float) -> None:
    """GPT-2 and BERT with the default dropout of hidden states, attention's off."""
    # per layer there are four outlier channels of each tensor, and the states of a CPU's generator for a checkpoint's
    # second run: at 256 they weigh more than the bars allow
    hidden = 256 if how in ("exact", "int8") else 512
    assert _slope(name, how, hidden) <= bar + (MASKS[name] if how == "int4" else 0)
