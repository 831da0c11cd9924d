"""What a training will need, without weights or a device.

`estimates` is the entry point. `meta_model` builds the model without memory, `layers` finds runs of equal layers,
`fake_step` runs a step of a shortened model, and `extrapolation` computes the whole model's step from it. `optimizers`
and `quantized` give the bytes that are held beside activations; `result` is what the user gets. `largest` searches for
the largest batch and the longest sequences.
"""
