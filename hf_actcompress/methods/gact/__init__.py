"""GACT, arXiv 2206.11357: integers whose bits are chosen by how much their rounding changes the gradient.

Keeps: codes of 4 bits on average, and one range per group. Gradient: approximate; without bias where no signs are kept.
Ask for it by the preset "gact", or by the codec "int4_measured" with `refresh_bits`.
"""
