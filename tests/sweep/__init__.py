"""The sweep compares stock and patched models, for every model type of transformers that can be built tiny."""
