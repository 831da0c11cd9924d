"""How an estimate is made: a step on fake tensors, counted as the allocator would."""
