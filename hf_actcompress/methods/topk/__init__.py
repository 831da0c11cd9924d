"""DropIT, arXiv 2202.13808: the largest entries of a linear layer's input.

Keeps: these entries and their places. Gradient: that of the weight is too small; all others are exact. Ask for it by
the preset "dropit" or a codec such as "topk10".
"""
