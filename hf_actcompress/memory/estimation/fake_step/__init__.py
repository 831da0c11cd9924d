"""One training step on fake tensors: no memory is taken, and every allocation is counted.

`step` runs it: a `batch` of made-up inputs goes through the model, `fake_allocator` counts what each operation would
take and give back, by the rules of the device (`cuda_rules`, `workspaces`, `masks`, `stand_ins`, `fake_kernels`).
`compiled` does the same for a graph of torch.compile. `op_results` remembers what calls return by their shapes, so
that a layer like the last one costs no time.
"""
