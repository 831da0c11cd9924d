"""torch.compile of patched models for lengths that change: one graph for all of them, or an error that says why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_actcompress import patch_model
from hf_actcompress.methods.actnn.codec import IntRanked
from tests.families import BY_NAME, relative_error, step
from tests.integration.compiling import BACKEND, build, kept_by, one_graph

pytestmark = pytest.mark.daily(8)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("preset", ["exact", "int8", "int4"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_lengths_that_change(preset: str, dynamic: bool | None) -> None:
    """dynamic=True: one graph for all lengths; by default one for the first and one for the rest. Bytes as in eager."""
    family = BY_NAME["llama"]
    model = patch_model(build(family), preset)
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=dynamic)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for times in (1, 2, 3):
        batch = {name: x.repeat(1, times) for name, x in family.make_batch().items()}
        assert kept_by(compiled, batch) <= 1.02 * kept_by(model, batch) + 2048
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + (1 if dynamic else 2)


@pytest.mark.parametrize("preset", ["tempo", "fewbit", "inverted", "dropit", "blocksparse"])
def test_presets_that_are_not_traced_for_any_length(preset: str) -> None:
    """Torch cannot trace their constants: fullgraph=True says so; otherwise those modules run in eager mode."""
    family = BY_NAME["bert"]
    model, batch = patch_model(build(family), preset), family.make_batch()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="without it the preset works"):
        torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)(**batch)
    if preset == "tempo":
        loss, expected = step(model, batch)
        model.compile(backend=BACKEND, dynamic=True)
        found_loss, found = step(model, batch)
        assert torch.equal(found_loss, loss)
        assert relative_error(found, {name: g.double() for name, g in expected.items()}) < 0.01


def test_a_codec_that_is_not_traced_for_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it, and what to do."""

    def pack(self: IntRanked, x: Tensor) -> Any:
        raise TypeError("this codec looks at sizes, which a graph for any length does not know")

    monkeypatch.setattr(IntRanked, "pack", pack)
    family = BY_NAME["llama"]
    compiled = torch.compile(patch_model(build(family), "actnn"), fullgraph=True, backend=BACKEND, dynamic=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"Ranked.* dynamic=False"):
        compiled(**family.make_batch())


def test_any_length_has_the_gradients_of_one() -> None:
    """But for roundings: a graph for any length may keep another view of a tensor."""
    family = BY_NAME["llama"]
    model = patch_model(build(family), "int8")
    batch = {name: x.repeat(1, 2) for name, x in family.make_batch().items()}
    loss, expected = step(one_graph(model), batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=BACKEND, dynamic=True)
    step(compiled, family.make_batch())
    found_loss, found = step(compiled, batch)
    assert torch.equal(found_loss, loss)
    assert relative_error(found, {name: g.double() for name, g in expected.items()}) < 0.01
