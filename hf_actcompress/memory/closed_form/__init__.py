"""The estimate as a formula: it fits `quick/data/` to traces of `estimate`. `python -m` of this package writes it."""
