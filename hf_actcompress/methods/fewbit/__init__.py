"""Few-bit backward, arXiv 2202.00441, and Approx-BP, arXiv 2406.16282: an activation's derivative in codes.

Keeps: f'(x) in 1 to 8 bits per element. Gradient: approximate; f' errs by 0.2% (8 bits) to 32%. Ask for it by the
preset "fewbit" or by `activation_variant="steps3"`. `tables.py` is written by recipes/fit_fewbit.py.
"""
