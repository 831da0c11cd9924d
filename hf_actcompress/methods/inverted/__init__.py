"""Inverted Activations, arXiv 2407.15545, and Tempo, arXiv 2210.10246: f' of an activation from its output.

Keeps: the output, which the next layer keeps anyway, and one bit per element. Gradient: f' to 2e-5. Ask for it by the
preset "inverted" or by `activation_variant="output"`. `tables.py` is written by recipes/fit_inverted_activations.py.
"""
