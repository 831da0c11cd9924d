"""The bytes that a layer moves in a training step, without products and attention: per token, in units of h.

Figures per layer and token are differences between two depths and two batch sizes. h is the hidden size: a tensor
[tokens, h] of 16 bits that is read or written once is 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .bench_models import Shape
from .traffic import Traffic

DEPTHS, BATCHES = (1, 2), (1, 2)
SEQUENCE, VOCABULARY = 16, 64
# makes a context around a pass, in which the counter also learns of kernels
Watch = Callable[[Traffic], AbstractContextManager[Any]]


def shape(family: str, layers: int, hidden: int) -> Shape:
    """Layers in the shape of Llama-3, BERT or GPT-2: MLPs 3.5 or 4 times as wide, 1/4 of the keys."""
    return Shape(hidden, layers, 4, 1, hidden * 7 // 2 if family == "llama" else 4 * hidden, VOCABULARY)


def per_token(
    build: Callable[[Shape], Any],
    family: str,
    hidden: int,
    autocast: bool = False,
    watch: Watch = lambda _: nullcontext(),
) -> tuple[dict[str, float], dict[str, float], float]:
    """What forward and backward move, by the name of the op, and the launches per layer.

    Args:
        build: Makes the model, in train mode and prepared for its mode.
        family: The model's family, for its proportions.
        hidden: Its hidden size, a multiple of 32.
        autocast: Whether the forward runs under bf16 autocast.
        watch: Tells a counter about kernels.
    """
    forward, backward, launches = Counter[str](), Counter[str](), 0
    for sign, layers in zip((-1, 1), DEPTHS, strict=True):
        model = build(shape(family, layers, hidden))
        # a first step, because what happens only once must not be counted
        _step(model, BATCHES[0], autocast, watch)
        for turn, batch in zip((-1, 1), BATCHES, strict=True):
            for found, made in zip((forward, backward), _step(model, batch, autocast, watch), strict=True):
                launches += sign * made.launches if turn > 0 else 0
                for op, moved in made.moved.items():
                    found[op] += sign * turn * moved
    unit = (DEPTHS[1] - DEPTHS[0]) * (BATCHES[1] - BATCHES[0]) * SEQUENCE * hidden
    ways = [{op: moved / unit for op, moved in found.most_common() if moved} for found in (forward, backward)]
    return ways[0], ways[1], launches / (DEPTHS[1] - DEPTHS[0])


def _step(model: Any, batch: int, autocast: bool, watch: Watch) -> tuple[Traffic, Traffic]:
    """The traffic of the forward and of the backward of one step, without the loss, whose bytes are not the layers'."""
    ids = torch.randint(5, VOCABULARY, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    # with adapters, the body is that of the model inside of peft's wrapper
    body = (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model
    forward, backward = Traffic(), Traffic()
    with watch(forward), forward, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = body(input_ids=ids).last_hidden_state
    with watch(backward), backward:
        hidden.backward(torch.ones_like(hidden))
    return forward, backward
