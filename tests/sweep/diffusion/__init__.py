"""The sweep over the classes of diffusers: each with a tiny config and a batch, stock and patched compared."""
