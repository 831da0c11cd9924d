"""Tempo, arXiv 2210.10246: eager attention that keeps its probabilities once.

Keeps: q, k, v, the probabilities and the state of the random generator; no mask and no dropped probabilities. Gradient:
exact. Ask for it by the preset "tempo", which has Tempo's norms and activations (`norm_output`, `inverted`), too, or by
`attention_variant="tempo"`.
"""
