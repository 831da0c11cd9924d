"""What a training will need, without weights or a device.

`estimates` is the way through: `meta_model` builds the model without memory, `layers` finds runs of equal layers,
`fake_step` runs a step of a short model, `extrapolation` makes the whole of it, `optimizers` and `quantized` know what
is held beside activations, `result` shows it. `largest` searches for the largest batch and the longest sequences.
"""
