"""`estimate --quick --json` has the form of `estimate --json`."""

from __future__ import annotations

import json

from tests.cli.invoke import SIZES, run


def test_the_formula_answers_in_the_same_form(model):
    """The same keys, in rows and in their parts, with null for what it does not know; `peak_bytes` is with context."""
    whole, formula = (
        json.loads(run("estimate", model, *SIZES, "--json", *quick).stdout) for quick in ((), ("--quick",))
    )
    assert whole.keys() == formula.keys()
    rows = [{row["strategy"]: row for row in found["rows"]} for found in (whole, formula)]
    for name, row in rows[1].items():
        parts = row["estimate"]
        assert row.keys() == rows[0][name].keys() and parts.keys() == rows[0][name]["estimate"].keys()
        assert row["peak_bytes"] == parts["device_bytes"] == parts["total_peak_bytes"] + parts["context_bytes"]
        known = [key for key, value in parts.items() if value is not None and key not in ("config", "notes")]
        kinds = [(type(parts[key]), type(rows[0][name]["estimate"][key])) for key in known]
        assert all(mine is theirs for mine, theirs in kinds) and len(known) >= 15
