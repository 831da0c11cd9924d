"""What is kept now: a model runs, and the allocator's events or the saved tensors are read.

`memory_report` is the entry point: `restore` leaves the model as it was, `saved_tensors` notes what autograd saves and
in which module, `report` sums it up, `advice` names what can still be turned off. `allocator` and `timeline` count
bytes over a whole step.
"""
