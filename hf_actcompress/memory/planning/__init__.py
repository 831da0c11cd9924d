"""How a plan is made: what each way to keep a layer costs, and the cheapest choice that fits."""
