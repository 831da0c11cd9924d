"""The published methods, a folder each; README.md lists them. The rest of the package can be read without them.

The name of a file says to which layer it belongs: `reference.py` and `tables.py` to `reference/`, `kernel.py` to
`kernels/`, `codec.py` to `codecs/`, `op.py` to `ops/` and `model.py` to `models/`; more words may follow, as in
`model_layers.py`. A file imports what its layer may import (`tests/test_imports.py`).
"""
