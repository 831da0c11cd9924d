"""Structured activation pruning, arXiv 2311.16883: the tiles of a linear layer's input that have the largest norms.

Keeps: these tiles and their places. Gradient: that of the weight is too small; all others are exact. Ask for it by the
preset "blocksparse" or a codec such as "block30".
"""
