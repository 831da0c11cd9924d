"""Nested forward differentiation, arXiv 2209.10778: a pointwise activation computes f'(x) in the forward.

Keeps: f'(x), and neither input nor output. Gradient: exact but for one rounding of f'. Ask for it by the preset
"forward_ad" or by `activation_variant="derivative"`.
"""
