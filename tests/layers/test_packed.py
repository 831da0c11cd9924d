"""Plans of packed rows: our attention is one node of a layer's graph, and keeps what backward cannot have otherwise."""

from __future__ import annotations

import pytest

from hf_actcompress import kept_bytes, patch_model
from tests.families import BY_NAME, Family, build, relative_error, step
from tests.layers.plans import LEAVES, PLANS, calls
from tests.models.test_packed import GEMMA3, packed, rows


@pytest.mark.parametrize("family", [BY_NAME["qwen3"], GEMMA3], ids=lambda family: family.name)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_queries_and_keys_are_not_kept_beside_the_inputs_of_their_norms(family: Family, checkpointing: bool) -> None:
    """A plan keeps no more than the modules do one by one, and the gradients are the same."""
    kept, steps, batch = [], [], packed(rows())
    for options in (LEAVES, PLANS):
        model = build(family, "fp32")
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        patch_model(model, options)
        steps.append(step(model, batch))
        kept.append(kept_bytes(lambda model=model: model(**batch).loss, "cpu"))  # type: ignore[misc]
    assert calls(model) == [2, 2] and kept[1] <= kept[0]
    assert relative_error(steps[1][1], {name: grad.double() for name, grad in steps[0][1].items()}) < 2e-6
