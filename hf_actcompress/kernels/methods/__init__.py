"""Kernels for functions of published methods; names and signatures are those in `reference.methods`."""
