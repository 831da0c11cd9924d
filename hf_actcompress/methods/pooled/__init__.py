"""Pooled activations, arXiv 2409.11902: means of neighbouring tokens or pixels.

Keeps: one mean per group. Gradient: that of the weight misses the covariance within the groups; all others are exact.
Ask for it by the preset "pooled" or a codec such as "pool2".
"""
