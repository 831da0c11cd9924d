"""The sweep: every model type of transformers that can be built tiny, stock beside patched."""
