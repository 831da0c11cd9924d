"""Which tensors an op keeps in the published methods."""
