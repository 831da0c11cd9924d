"""Models that make their plans at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from torch import Tensor, nn

from hf_actcompress import patch_model
from tests.families import BY_NAME, relative_error, step
from tests.layers.plans import PLANS, assert_all_ran

NAMES = ("llama", "bert", "gpt2-gelu-new", "qwen3")


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "compiled"])
def test_plans_are_made_in_threads(compile: bool) -> None:
    names = NAMES[:2] if compile else NAMES
    stock = {name: BY_NAME[name].build() for name in names}
    ours = {name: patch_model(BY_NAME[name].build(), replace(PLANS, compile=compile)) for name in names}
    found: dict[str, dict[str, Tensor]] = {}

    def train(name: str) -> None:
        found[name] = step(ours[name], BY_NAME[name].make_batch())[1]

    before = nn.Module.__call__
    threads = [threading.Thread(target=train, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # a tracer replaces this in all threads
    assert nn.Module.__call__ is before
    for name in names:
        expected = step(stock[name], BY_NAME[name].make_batch())[1]
        assert found[name].keys() == expected.keys()
        equal = all(found[name][n].equal(x) for n, x in expected.items())
        assert relative_error(found[name], expected) < 1e-5 if compile else equal
        assert_all_ran(ours[name])
