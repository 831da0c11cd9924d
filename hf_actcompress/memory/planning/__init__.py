"""How a plan is made: what each way to keep a layer costs, and the cheapest choice that fits.

`plans` is the entry point. `options` lists the ways to keep a layer and runs a step on fake tensors for the bytes of
each, `costs` gives the time and the gradient error of each, and `knapsack` chooses the cheapest combination that fits.
`result` is what the user gets.
"""
