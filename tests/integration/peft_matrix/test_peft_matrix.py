"""A sample of the PEFT matrix that changes from day to day, and the cells that have failed before.

`python -m tests.integration.peft_matrix` runs all cells.
"""

from __future__ import annotations

import datetime
import os
import random
import time

import pytest
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from tests.integration.peft_matrix.__main__ import RESULTS, read
from tests.integration.peft_matrix.cells import PLAYS, SKIPPED, Row, run_cell
from tests.integration.peft_matrix.methods import BY_METHOD, METHODS
from tests.integration.peft_matrix.side import PATCH_FIRST
from tests.integration.peft_matrix.subjects import BY_SUBJECT

# a night runs more than a push
SECONDS = 120 if os.environ.get("ALL_CASES") else 20
# write the number of a failing run here to run its sample again
SEED = int(os.environ.get("PEFT_MATRIX_SEED") or datetime.date.today().toordinal())

# each of these cells had a wrong result, crashed, or silently lost its memory savings
FAILED_BEFORE: tuple[tuple[str, str, str, str], ...] = (
    # PEFT writes in place into the output of the base layer
    ("adalora", "llama", "train", "fp32"),
    ("adalora", "bert", "train", "fp32"),
    ("gralora", "llama", "train", "fp32"),
    ("gralora hybrid", "bert", "train", "bf16"),
    ("c3a", "vit", "train", "fp32"),
    ("bdlora", "bert", "train", "fp32"),
    ("alora", "gpt2-gelu-tanh", "train", "fp32"),
    ("poly", "bert", "train", "fp32"),
    # each forward takes the next sample of an object that is no module; a trace took one, too
    ("monteclora", "vit", "unload and add", "fp32"),
    # PEFT reads the name of an adapter layer's class
    ("lora parameters", "llama", "second adapter", "fp32"),
    # PEFT creates the adapter's layers again after the first forward
    ("eva", "bert", "train", "fp32"),
    # PEFT only accepts layers of exactly torch's type
    ("glora", "llama", "train", "fp32"),
    ("glora vector", "bert", "second adapter", "fp32"),
    # the names of the adapters are the same before and after
    ("lora", "llama", "unload and add", "fp32"),
    ("ia3", "bert", "unload and add", "fp32"),
    # PEFT copies the base layer and its class, but not the settings from `patch_model`
    ("lora convolution", "vit", "train", "fp32"),
    ("lora convolution", "vit", "second adapter", "fp32"),
    ("dora convolution", "vit", "train", "fp32"),
)


def _bad(rows: list[Row]) -> list[str]:
    return [f"{row.method}, {row.subject}, {row.scenario}, {row.mode}, {row.order}: {row.status}: {row.detail}"
            for row in rows if not row.good and row.status not in SKIPPED]  # fmt: skip


@pytest.mark.daily(3)
@pytest.mark.parametrize("cell", FAILED_BEFORE, ids=", ".join)
def test_failed_before(cell: tuple[str, str, str, str]) -> None:
    method, subject, scenario, mode = cell
    rows = run_cell(BY_METHOD[method], BY_SUBJECT[subject], scenario, mode)
    assert not _bad(rows), "\n".join(_bad(rows))
    assert all(row.good for row in rows), rows
    refused = [row.order for row in rows if row.status == "refused"]
    assert refused == ([PATCH_FIRST] if BY_METHOD[method].exact_types else [])


def test_sample() -> None:
    """Run as many cells as the time allows, in a random order that changes from day to day."""
    cells = [(m, s, *play) for m in BY_METHOD for s in BY_SUBJECT for play in PLAYS]
    random.Random(SEED).shuffle(cells)
    end = time.monotonic() + SECONDS
    rows: list[Row] = []
    while time.monotonic() < end and cells:
        method, subject, scenario, mode = cells.pop(0)
        rows += run_cell(BY_METHOD[method], BY_SUBJECT[subject], scenario, mode)
    print(f"{len(rows)} rows with PEFT_MATRIX_SEED={SEED}")
    assert sum(row.good for row in rows) >= len(rows) // 4, "most of the sample could not be compared"
    assert not _bad(rows), f"PEFT_MATRIX_SEED={SEED}\n" + "\n".join(_bad(rows))


def test_every_method_of_the_installed_peft_has_a_row() -> None:
    assert {method.peft_type for method in METHODS} == {str(kind.value) for kind in PEFT_TYPE_TO_CONFIG_MAPPING}


def _table() -> list[Row]:
    rows = read(RESULTS)
    if not rows:
        pytest.skip("no table: `python -m tests.integration.peft_matrix` has not been run to its end yet")
    return rows


def test_committed_table_has_every_cell() -> None:
    cells = {(row.method, row.subject, row.scenario, row.mode) for row in _table()}
    assert cells == {(m, s, *play) for m in BY_METHOD for s in BY_SUBJECT for play in PLAYS}


def test_every_method_was_compared_on_some_model() -> None:
    """Exceptions are methods that need a GPU or a library that is missing, and their reasons say so."""
    rows = _table()
    compared = {row.method for row in rows if row.good}
    reasons = {row.method: row.detail for row in rows if row.method not in compared and row.status in SKIPPED}
    assert all("CUDA" in reason or "No module named" in reason for reason in reasons.values()), reasons
