"""What CUDA's caching allocator reserves for a step, by a replay of the step's allocations through its rules."""
