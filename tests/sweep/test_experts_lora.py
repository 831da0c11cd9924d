"""The table of LoRA on experts: its figures, and that the adapters are on the experts."""

from __future__ import annotations

from typing import Any

import pytest

peft: Any = pytest.importorskip("peft")

from tests.sweep.experts_lora import IMPLEMENTATIONS, MODELS, WEIGHTS, build, run  # noqa: E402
from tests.sweep.step import difference  # noqa: E402
from tests.sweep.table import HERE  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not hasattr(peft.tuners.lora.layer, "_LoraFactorsProxy"),
        reason="this PEFT makes the whole difference of the weights",
    ),
]


def written(name: str, implementation: str) -> list[str]:
    """The cells of a row, from stock's KiB on."""
    rows = (HERE / "experts_lora.md").read_text().splitlines()
    found = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    (cells,) = (cells[2:] for cells in found if cells[:2] == [name, implementation])
    return cells


def share(cell: str) -> float:
    return float(cell.rstrip("%")) / 100


@pytest.mark.daily(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MODELS)
def test_exact_keeps_the_share_that_is_written_with_gradients_of_stock(name: str, implementation: str) -> None:
    stock, exact = (run(name, implementation, preset) for preset in (None, "exact"))
    assert difference(exact.gradients, stock.gradients) < 1e-6
    assert exact.kept / stock.kept == pytest.approx(share(written(name, implementation)[1]), abs=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_two_parameters_of_all_layers_are_adapted(name: str) -> None:
    trained = {n for n, p in build(name, "eager").named_parameters() if p.requires_grad and ".experts." in n}
    assert len(trained) == 2 * 2 * 2


def test_every_figure_that_is_written() -> None:
    """Stock keeps the weights, exact less than half of stock's bytes, and errors are stock's.

    Batched products keep a twentieth. A loop over experts runs module by module, and stock's code keeps what it
    computes of each expert's tokens.
    """
    limits = {"grouped_mm": 0.5, "batched_mm": 0.05, "eager": 0.65}
    for name in MODELS:
        for implementation in IMPLEMENTATIONS:
            stock, exact, int8, difference_, *errors = written(name, implementation)
            assert float(stock.replace(",", "")) * 1024 > WEIGHTS
            assert share(int8) < share(exact) < limits[implementation]
            assert float(difference_) < 1e-6
            assert float(errors[1]) <= 1.1 * float(errors[0])
