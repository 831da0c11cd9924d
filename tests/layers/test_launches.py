"""Kernel launches of a step (dispatched ops that are not views) per layer, of stock and of plans, and the function
calls that the net under all rules costs a layer that runs by plans.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import pstats
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_actcompress import CompressionConfig, patch_model
from tests.families import BY_NAME
from tests.layers.plans import PLANS, calls

# these are not views, but run no kernel either
_NOTHING = ("detach", "empty", "empty_like", "new_empty", "_unsafe_view", "_reshape_alias", "lift_fresh", "alias")
# model, dtype, rate of dropout -> the largest allowed ratio of a layer's launches to stock's. What is recomputed in
# backward is launched once more: norms, activations, masks of dropout
LIMITS = {
    ("llama", torch.bfloat16, 0.0): 1.11,
    ("llama", torch.float32, 0.0): 1.08,
    ("gpt2-gelu-new", torch.bfloat16, 0.0): 1.18,
    ("gpt2-gelu-new", torch.bfloat16, 0.1): 1.25,
    ("gpt2-gelu-new", torch.float32, 0.0): 1.18,
    ("bert", torch.bfloat16, 0.0): 1.1,
    ("bert", torch.bfloat16, 0.1): 1.2,
}
DEPTHS = {"llama": "num_hidden_layers", "gpt2-gelu-new": "n_layer", "bert": "num_hidden_layers"}
RATES = {"llama": "attention_dropout", "gpt2-gelu-new": "resid_pdrop", "bert": "hidden_dropout_prob"}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func.overloadpacket.__name__ in ("mm", "addmm", "bmm", "baddbmm")
        self.count += not func.is_view and func.overloadpacket.__name__ not in _NOTHING
        return func(*args, **(kwargs or {}))


def launches(model: Any, name: str) -> tuple[int, int]:
    """All launches of a step, and those of matrix products."""
    batch = BY_NAME[name].make_batch()
    model(**batch).loss.backward()
    with Launches() as counter:
        model(**batch).loss.backward()
    return counter.count, counter.products


@pytest.mark.parametrize(("name", "dtype", "dropout"), LIMITS)
def test_few_more_launches_than_stock(name: str, dtype: torch.dtype, dropout: float) -> None:
    counts = []
    for layers in (1, 3):
        # probabilities have no dropout, because with it a CPU has no fused attention
        stock = BY_NAME[name].build(dtype, **{DEPTHS[name]: layers, RATES[name]: dropout})
        plans = patch_model(copy.deepcopy(stock), PLANS)
        counts.append((launches(stock, name), launches(plans, name)))
        assert calls(plans) == [2] * layers
    of_stock, ours = ([b - a for a, b in zip(*both, strict=True)] for both in zip(*counts, strict=True))
    assert ours[0] <= LIMITS[name, dtype, dropout] * of_stock[0]
    assert ours[1] == of_stock[1] > 0


def _function_calls(model: Any, name: str) -> int:
    """The number of calls of Python and built-in functions in a step."""
    batch = BY_NAME[name].make_batch()
    for _ in range(2):
        model(**batch).loss.backward()
    profile = cProfile.Profile()
    gc.collect()
    # in the step, the collector would call functions for the objects of earlier tests
    gc.disable()
    try:
        loss = profile.runcall(lambda: model(**batch).loss)
        profile.runcall(loss.backward)
    finally:
        gc.enable()
    # the type hints of pstats lack this attribute
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("name", DEPTHS)
def test_a_step_costs_few_function_calls_and_the_net_fewer(name: str) -> None:
    slopes, outside = [], []
    for net in (True, False):
        at = []
        for layers in (2, 4):
            stock = BY_NAME[name].build(torch.float32, **{DEPTHS[name]: layers})
            model = patch_model(stock, CompressionConfig(net=net))
            at.append(_function_calls(model, name))
            assert calls(model) == [3] * layers
        slopes.append(at[1] - at[0])
        outside.append(2 * at[0] - at[1])
    # without a net an op asks nothing but whether there is one
    assert (slopes[0] - slopes[1]) / 2 <= (16 if name == "bert" else 9), slopes
    assert slopes[0] / 2 <= {"llama": 375, "bert": 410, "gpt2-gelu-new": 285}[name], slopes
    # stock makes 500 to 750; the rest is the loss head's and that of modules that are no layers
    assert outside[0] <= {"llama": 2250, "bert": 2720, "gpt2-gelu-new": 2350}[name], outside
