"""Models with packed weights: which layers are packed, in which format, and what stands for them in an estimate."""
