"""Estimates by a formula, in milliseconds and without torch; its coefficients are fitted to `estimate` (data/)."""
