"""WTA-CRS, arXiv 2305.15265, and column-row sampling: some tokens stand for all in a linear layer's weight gradient.

Keeps: the rows of the sampled tokens. Gradient: that of the weight is an estimate without bias; all others are exact.
Ask for it by the preset "sampled", or by "wtacrs", which also draws by the norms of earlier gradients
(`gradient_norms`), or by a codec such as "wtacrs30".
"""
