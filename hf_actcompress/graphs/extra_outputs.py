"""Outputs of a layer's graph that the layer does not return: checks, and what is to be written into weights.

A graph writes nothing itself. Gemma 3n clamps some weights before it uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

_COPY = torch.ops.aten.copy_.default


class ExtraOutputs(NamedTuple):
    """The last outputs of a graph, which the module does not return.

    Attributes:
        checks: What the first ones have to be, so that what the graph computes is right.
        written: The weights, by place, into which the others are written.
    """

    checks: tuple[bool, ...] = ()
    written: tuple[int, ...] = ()

    def write(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Write them, as the module's own code does, which no version shows."""
        for i, value in zip(self.written, outputs[len(outputs) - len(self.written) :], strict=True):
            inputs[i].data.copy_(value)


def writes_as_outputs(graph: Graph, weights: int, tangents: list[Tensor]) -> list[int]:
    """Turn writes into weights into outputs, behind the other ones.

    Args:
        graph: A joint graph without ops that write, except into its inputs. It returns outputs and gradients of inputs.
        weights: How many of the first inputs are weights.
        tangents: The gradients of the outputs; those of the new outputs are added, as new inputs of the graph.

    Returns:
        The weights that are written, by place.
    """
    places = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder")[:weights])}
    written: list[int] = []
    output = graph.output_node()
    for node in graph.find_nodes(op="call_function", target=_COPY):
        x, value = node.args[:2]
        # a value of another shape is one that torch would have to repeat
        if x not in places or value.meta["val"].shape != x.meta["val"].shape or places[x] in written:
            continue
        values = list(output.args[0])  # type: ignore[arg-type]
        values.insert(len(tangents), value)
        output.args = (values,)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            tangent = graph.placeholder(f"tangents_{len(tangents) + 1}")
        tangent.meta["val"] = torch.empty_like(value.meta["val"], memory_format=torch.contiguous_format)
        tangents.append(tangent.meta["val"])
        written.append(places[x])
        # what is made of the weight again in backward would be made of the written one
        value.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        graph.erase_node(node)
    return written
