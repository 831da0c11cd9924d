"""One training step on fake tensors: no memory is taken, and every allocation is counted.

`step` runs it. `batch` makes up the inputs, and `fake_allocator` counts what each operation would allocate and free, by
the rules of the device (`cuda_rules`, `workspaces`, `masks`, `stand_ins`, `fake_kernels`); code that asks for values
gets those of `answers`. `compiled` does the same for a graph of torch.compile. `op_results` remembers by shapes what
each op returns, so that a further equal layer takes almost no time.
"""
