"""What torch.compile of a patched model warns of: a backend that keeps what stock keeps, and broken graphs."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn

from hf_actcompress import CompressionConfig, patch_model, unpatch_model
from tests.families import BY_NAME, differing, relative_error, step
from tests.integration.compiling import BACKEND, build, kept_by, one_graph

pytestmark = pytest.mark.daily(6)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def test_a_backend_that_does_not_read_the_marks(caplog: pytest.LogCaptureFixture) -> None:
    """It computes the right values and one warning says that it saves nothing."""
    from hf_actcompress.compilation import marks

    marks._say_unread.cache_clear()
    family = BY_NAME["llama"]
    batch, model = family.make_batch(), patch_model(build(family))
    stock_loss, _ = step(one_graph(unpatch_model(copy.deepcopy(model)), "aot_eager"), batch)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loss, _ = step(one_graph(model, "aot_eager"), batch)
    assert torch.equal(loss, stock_loss)
    assert len([r for r in caplog.records if "backend that does not read" in r.message]) == 1


class _Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return nn.functional.silu(x)


def test_a_break_inside_of_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    """Each part saves; one warning says that what lies between parts is kept."""
    from hf_actcompress.compilation import breaks

    breaks._say_broken.cache_clear()
    # of another model
    torch.compile(_Breaks(), backend="eager")(torch.ones(2))
    family = BY_NAME["llama"]
    stock = build(family)
    for layer in stock.model.layers:
        layer.mlp.act_fn = _Breaks()
    batch, ours = family.make_batch(), patch_model(copy.deepcopy(stock))
    with caplog.at_level(logging.WARNING):
        loss, grads = step(torch.compile(ours, backend=BACKEND), batch)
    expected_loss, expected = step(torch.compile(stock, backend="aot_eager"), batch)
    assert torch.equal(loss, expected_loss) and not differing(grads, expected)
    # the net sees no compiled code, and no plan runs in a compiled layer
    eager = patch_model(copy.deepcopy(stock), CompressionConfig(net=False, plans=False))
    assert kept_by(torch.compile(ours, backend=BACKEND), batch) <= 1.15 * kept_by(eager, batch)
    assert len([r for r in caplog.records if "broken the graph" in r.message]) == 1
    caplog.clear()
    whole = patch_model(build(family))
    with caplog.at_level(logging.WARNING):
        torch.compile(whole, backend=BACKEND)(**batch)
    assert not [r for r in caplog.records if "broken the graph" in r.message]


@pytest.mark.parametrize("preset", ["exact", "int8"])
def test_layers_that_cannot_be_traced(preset: str, caplog: pytest.LogCaptureFixture) -> None:
    """They run and save as in eager mode, and one warning says so; the graphs beside them hold what stock's hold."""
    from hf_actcompress.compilation import breaks

    breaks._say_broken.cache_clear()
    family = BY_NAME["llama"]
    stock = build(family)
    batch = family.make_batch()
    for layer in stock.model.layers:
        layer.forward = torch.compiler.disable(layer.forward)
    ours = build(family)
    patch_model(ours, CompressionConfig.from_preset(preset, net=False))
    for layer in ours.model.layers:
        layer.forward = torch.compiler.disable(layer.forward)
    eager, (expected_loss, expected) = kept_by(ours, batch), step(ours, batch)
    with caplog.at_level(logging.WARNING):
        loss, grads = step(torch.compile(ours, backend=BACKEND), batch)
    assert torch.equal(loss, expected_loss)
    found = {name.removeprefix("_orig_mod."): g for name, g in grads.items()}
    assert relative_error(found, {name: g.double() for name, g in expected.items()}) < 0.01
    kept = kept_by(torch.compile(ours, backend=BACKEND), batch)
    assert kept <= 1.1 * eager and kept < 0.6 * kept_by(torch.compile(stock, backend="aot_eager"), batch)
    assert len([r for r in caplog.records if "broken the graph" in r.message]) == 1
