"""The joint graph of a layer's forward and backward, and the plan that is made of it.

`trace` runs a layer's code and autograd's own backward of it once on tensors without data. Each node of the forward is
kept or recomputed in backward (`rules`), torch's partitioner divides the graph (`divide`), what crosses is packed
(`packing`, `keeping`, `rows`), and both halves become straight-line code (`code`, `backward`). `make_plan` in `plan`
does all of this; nothing here knows a module, but for its codecs.
"""
