"""TokenTune, arXiv 2501.18824: layers that compute gradients for some tokens of each sequence alone.

Keeps: what the chosen tokens need, and the keys and values of all tokens. Gradient: exact for the chosen tokens; it is
not the gradient of all tokens. Ask for it by `CompressionConfig(tokens=0.3)`; `token_choice` says which tokens.
"""
