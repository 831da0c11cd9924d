"""The table of vision-language models: its figures, and that their pixels and adapters are what it says."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("sklearn")

from tests.sweep.step import difference  # noqa: E402
from tests.sweep.table import HERE  # noqa: E402
from tests.sweep.vision_language import MODELS, WEIGHTS, batch_for, build, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
every_model = pytest.mark.parametrize("name", MODELS)


def written(name: str, weights: str) -> tuple[list[str], list[str]]:
    """The cells of a model in the first table and in the second one."""
    rows = (HERE / "vision_language.md").read_text().splitlines()
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    kept, gradients = (cells[2:] for cells in found if cells[:2] == [name, weights])
    return kept, gradients


def share(cell: str) -> float:
    return float(cell.rstrip("%")) / 100


@pytest.mark.daily(2)
@every_model
def test_exact_keeps_the_share_that_is_written_with_gradients_of_stock(name: str) -> None:
    stock, exact = run(name, "fp32", None), run(name, "fp32", "exact")
    assert difference(exact.gradients, stock.gradients) < 1e-6
    assert exact.kept / stock.kept == pytest.approx(share(written(name, "fp32")[0][1]), abs=0.02)


@pytest.mark.daily(4)
@every_model
def test_checkpointed(name: str) -> None:
    stock, exact = (run(name, "fp32", preset, "tower left out") for preset in (None, "exact"))
    assert difference(exact.gradients, stock.gradients) < 1e-6
    assert exact.kept / stock.kept == pytest.approx(share(written(name, "fp32")[0][6]), abs=0.02)


@every_model
def test_a_tower_that_is_left_out_changes_no_gradient_and_keeps_less(name: str) -> None:
    """Of stock's models; how much less depends on how large the tower is."""
    as_enabled, left_out = (run(name, "fp32", None, how) for how in ("as enabled", "tower left out"))
    assert difference(left_out.gradients, as_enabled.gradients) == 0
    assert left_out.kept < as_enabled.kept < run(name, "fp32", None).kept


@every_model
def test_adapters_are_in_the_language_part_and_pixels_reach_them(name: str) -> None:
    model, batch = build(name), batch_for(name)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 4 * 2 and not any("vis" in n for n in trained)
    loss: Any = model(**batch).loss
    assert model(**{**batch, "pixel_values": batch["pixel_values"].flip(0)}).loss != loss


def test_every_share_that_is_written_is_one() -> None:
    """Exact keeps at most three quarters of stock's bytes, int8 at most a third, and bf16 errors are stock's."""
    for name in MODELS:
        for weights in WEIGHTS:
            kept, gradients = written(name, weights)
            assert share(kept[1]) <= 0.75 and share(kept[2]) <= 0.33 and share(kept[6]) <= 0.6
            limit = 1e-6 if weights == "fp32" else 3e-3
            assert all(float(cell) <= limit for cell in gradients[:3])
            assert float(gradients[4]) <= 1.1 * float(gradients[3])
