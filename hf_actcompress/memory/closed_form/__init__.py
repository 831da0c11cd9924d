"""The estimate as a formula: fits `quick/data/` to traces of `estimate`; `python -m` of this package writes it."""
