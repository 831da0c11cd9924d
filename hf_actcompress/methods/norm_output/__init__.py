"""Norms that keep their output instead of their input: Tempo, arXiv 2210.10246, and the same for RMSNorm.

Keeps: the output, which the next layer keeps anyway, and one number per row. Gradient: exact but for the rounding of
the output. Ask for it by the preset "tempo" or by `norm_variant="output"`.
"""
