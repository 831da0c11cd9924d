"""What a training will need, without weights or a device.

Users call `estimate` (one answer) or `Estimates` in `estimates` (several answers about one model). The walk of both:

1. `checks` refuses options that exclude each other. `meta_model` builds the model on the meta device (`meta_device`),
   and `quantized/` puts packed weights in. `random_model` makes a real one where `report` measures.
2. `layers` finds runs of equal layers. `model_copies` makes the patched copies of a shortened model.
3. `fake_step/` runs steps of these copies and counts allocations. `extrapolation` computes the step of the whole model
   from them (`growth`: what a further layer or batch adds), and `reserved/` what the caching allocator reserves.
4. `states/` adds what is held between steps, in one process or in one of several. `assembly` puts the parts together,
   and `result` is what the user gets.

`largest` searches for the largest batch and the longest sequences that fit, and begins where `guess` points.
"""
