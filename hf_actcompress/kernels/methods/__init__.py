"""Kernels of what published methods compute, with the names of `reference.methods`."""
