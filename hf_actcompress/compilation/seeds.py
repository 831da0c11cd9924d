"""Gives each draw on a CPU a tensor of its own for its seed, so that equal layers share one kernel.

Inductor makes all seeds as one tensor. Each kernel that draws has the place of its seed in this tensor as a constant in
its C++ code. So every dropout would have a kernel of its own, and each kernel takes a second to compile. On a GPU the
place is an argument of the kernel.
"""

from __future__ import annotations

from torch.fx import Graph

from ..private_apis import seed_ops
from .ordering import call


def divide_seeds(graph: Graph) -> None:
    """Replace each tensor of seeds on a CPU by one tensor per seed, with the same numbers.

    The graph must be the forward's: in a joint graph, torch's partitioner takes calls that make one seed each for
    repetitions of one call, and leaves one, so that all layers would draw the same mask. Where checkpointing passes the
    tensor of all seeds to backward, it stays.
    """
    make_seeds, look_up = seed_ops()
    for seeds in list(graph.nodes):
        if seeds.target is not make_seeds or seeds.args[1].type != "cpu":
            continue
        if any(user.target is not look_up for user in seeds.users):
            continue
        count, device = seeds.args
        with graph.inserting_before(seeds):
            # a CPU's generator draws one number after the other, so these are the numbers of one tensor
            single = [call(graph, seeds.meta["val"].fake_mode, seeds.target, 1, device) for _ in range(count)]
        for lookup in list(seeds.users):
            lookup.args = (single[lookup.args[1]], 0)
        graph.erase_node(seeds)
