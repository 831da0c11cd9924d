"""A plan: the forward and the backward of one kind of layer, as straight-line code over what crosses between them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..codecs import IDENTITY
from ..compilation.attribution import module_reading, running
from ..compilation.policy import of_forward
from ..ops.opaque import ATTEND, LINEAR
from ..ops.traced_tiles import TILED, TILED_BWD
from ..private_apis import FakeTensorMode
from .again import Recomputed, recomputed
from .backward import BackwardCode, Stops
from .checkpointed import Recompute, checkpointed, is_of_attention
from .code import forward_code
from .divide import Halves, divide
from .extra_outputs import ExtraOutputs
from .keeping import Outside, opened
from .ordering import lower_peak
from .packing import Others, Packed, packed_in
from .row_by_row import left_out
from .rows import LeftOut, TokenSizes
from .rules import PRODUCTS, made_of_these
from .tiled_inputs import own_inputs
from .trace import Joint

_NOTHING: frozenset[int] = frozenset()
_CALLS = {ATTEND, LINEAR, TILED, TILED_BWD}


@dataclass
class LayerPlan:
    """What one kind of layer runs.

    Attributes:
        forward: The code of the forward: of the inputs, it returns the outputs, what is kept and is no input, and the
            kept sizes.
        inputs: How many inputs it takes.
        outputs: How many outputs there are.
        tensors: Where the kept sizes begin in what `forward` returns.
        kept: For each kept tensor its place in (inputs, outputs, what is kept), and whether it is a weight.
        keepers: The module for which each is kept, for reports.
        outside: The kept activations that are inputs.
        packed: What goes through a codec.
        made: The outputs that are recomputed.
        ungraded: The outputs without a gradient.
        extra: What the last outputs are for, which the layer does not return.
        code: Writes the backward.
        order: The weights whose gradients are done one after the other.
        halves: The graphs.
        elements: How many elements all weights with a gradient have.
        repeats: The inputs that autograd is given once more, for each further gradient that it adds up.
        checkpointed: Whether it keeps its inputs, and makes again what it would keep otherwise.
        makes_weights: Whether its backward computes weights, such as an adapted one, from parameters.
        left_out: What a call checks that leaves rows out; None for a plan that keeps all rows.
        mode: The mode that made the tensors without data in the graphs.
        compiled: By the codecs of a layer's modules: the compiled code, or why there is none.
    """

    forward: Callable[..., tuple[Any, ...]]
    inputs: int
    outputs: int
    tensors: int
    kept: tuple[tuple[int, bool], ...]
    keepers: tuple[str, ...]
    outside: tuple[Outside, ...]
    packed: tuple[Packed, ...]
    made: tuple[Recomputed, ...]
    ungraded: tuple[int, ...]
    extra: ExtraOutputs
    code: BackwardCode
    order: tuple[tuple[int, ...], ...]
    halves: Halves
    elements: int
    repeats: tuple[int, ...]
    checkpointed: bool
    makes_weights: bool
    left_out: LeftOut | None
    mode: FakeTensorMode
    compiled: dict[Any, Any] = field(default_factory=dict)
    _backwards: dict[Any, tuple[Callable[..., Any], tuple[int, ...]]] = field(default_factory=dict)

    @cached_property
    def calls_again(self) -> bool:
        """Whether its backward calls what no tracer sees into: what runs again, and MLPs in tiles."""
        return any(node.target in _CALLS for node in self.halves.backward.graph.nodes)

    @cached_property
    def tiles(self) -> bool:
        """Whether it computes MLPs in tiles."""
        return any(node.target is TILED_BWD for node in self.halves.backward.graph.nodes)

    def missing(self, grads: Sequence[Tensor | None]) -> frozenset[int]:
        """The outputs that could have a gradient and have none."""
        # not `None in grads`: that calls the slow comparison of a tensor with None
        if not any([dy is None for dy in grads]):
            return _NOTHING
        return frozenset([i for i, dy in enumerate(grads) if dy is None and i not in self.ungraded])

    def backward(self, missing: frozenset[int], stops: Stops) -> tuple[Callable[..., Any], tuple[int, ...]]:
        """The code of the backward, and the missing gradients for which it wants zeros."""
        key = missing, stops
        if key not in self._backwards:
            self._backwards[key] = self.code.write(missing, stops)
        return self._backwards[key]


def make_plan(
    joint: Joint, again: Recompute, others: Others | None = None, sizes: TokenSizes | None = None
) -> LayerPlan:
    """Make the plan of a joint graph, which is changed.

    Args:
        joint: The graph.
        again: What backward makes again that a layer without checkpointing keeps.
        others: What goes through the layer's codec for all that no module has marked; None: nothing does.
        sizes: Where the tokens are, if rows of some of them are left out.
    """
    readers = _readers(joint)
    recomputes = again != Recompute.NOTHING
    halves = checkpointed(divide(joint), again) if recomputes else divide(joint)
    inputs, known = halves.inputs, {node: i for i, node in enumerate(halves.inputs)}
    own_inputs(halves.backward.graph)
    lower_peak(halves.backward.graph, {x for x, of in halves.read.items() if of not in known} | halves.tangents.keys())
    repeats = _apart(halves, readers)
    inner = [x for x in halves.kept if x not in known]
    packed = tuple(packed_in(halves, known, joint.parameters, others, sizes, codecs=not recomputes))
    outside = tuple(Outside(i, IDENTITY) for i, x in enumerate(halves.kept) if _is_activation(x, known, joint))
    inside = [halves.kept[x.place] for x in packed if not x.outside]
    opens = {x.place: x.opened for x in packed} | {x.place: opened for x in outside}
    code = BackwardCode(halves, opens | {i: opened for i, x in enumerate(halves.kept) if _is_graph(x)})
    return LayerPlan(
        forward=forward_code(halves.forward.graph, inputs, halves.outputs, [*inner, *halves.sizes], inside),
        inputs=len(inputs),
        outputs=joint.outputs,
        tensors=joint.outputs + len(inner),
        kept=tuple(_places(halves, known, inner, inside, joint.parameters)),
        # the layer itself keeps what it is given
        keepers=("",) * len(halves.kept) if recomputes else tuple(map(_keeper, halves.kept)),
        outside=outside,
        packed=packed,
        made=() if recomputes else _recomputed_outputs(halves, packed, joint.parameters),
        left_out=None if sizes is None else _left_out(halves, sizes, joint.parameters, outside, packed),
        ungraded=joint.ungraded,
        extra=joint.extra,
        code=code,
        order=code.order(joint.parameters),
        halves=halves,
        elements=_elements(joint, halves),
        repeats=repeats,
        checkpointed=recomputes,
        makes_weights=_makes_weights(halves, joint.parameters),
        mode=joint.mode,
    )


def _left_out(
    halves: Halves, sizes: TokenSizes, parameters: int, outside: Sequence[Outside], packed: Sequence[Packed]
) -> LeftOut:
    dropped = {halves.kept[x.place] for x in packed if x.rows is not None}
    given = (halves.kept[x.place] for x in outside)
    dropped |= {x for x in given if sizes.axes(x.meta["val"]) == (0, 1)}
    return left_out(halves, sizes, parameters, dropped)


def _recomputed_outputs(halves: Halves, packed: Sequence[Packed], parameters: int) -> tuple[Recomputed, ...]:
    backs = {halves.kept[x.place]: x.back for x in packed if not x.outside}
    found = (recomputed(halves, i, y, backs, parameters) for i, y in enumerate(halves.outputs))
    return tuple(made for made in found if made is not None)


def _keeper(x: Node) -> str:
    """The module for which a tensor is kept: attention keeps its own results, which others read, too. What an opaque
    attention keeps is in its own graph."""
    of_attention = is_of_attention(x) and x.args[0].target is not ATTEND  # type: ignore[union-attr]
    return (running(x) or "") if of_attention else module_reading(x)


def _is_graph(x: Node) -> bool:
    """Whether a value is the small graph of a function that no tracer sees into."""
    source = x.args[0] if x.target is operator.getitem and x.args[1] == 1 else None
    return isinstance(source, Node) and source.target in (ATTEND, LINEAR)


def _makes_weights(halves: Halves, parameters: int) -> bool:
    """Whether the backward computes a product of weights alone. It would see what somebody writes into a parameter's
    `data`, as adapters are merged."""
    weights = set(halves.inputs[:parameters])
    given = [node for node, x in halves.read.items() if x in weights]
    made = made_of_these(halves.backward.graph, given)
    return any(node.target in PRODUCTS for node in made)


def _is_activation(x: Node, inputs: dict[Node, int], joint: Joint) -> bool:
    return inputs.get(x, -1) >= joint.parameters and x.meta["val"].is_floating_point()


def _places(
    halves: Halves, inputs: dict[Node, int], inner: Sequence[Node], packed: Sequence[Node], parameters: int
) -> Iterator[tuple[int, bool]]:
    """For each kept tensor its place in (inputs, outputs, what is kept), and whether it is a weight."""
    for x in halves.kept:
        if x in inputs:
            yield inputs[x], inputs[x] < parameters
        elif x in halves.outputs and x not in packed:
            # saved as the output that autograd knows
            yield len(inputs) + halves.outputs.index(x), False
        else:
            yield len(inputs) + len(halves.outputs) + inner.index(x), False


def _readers(joint: Joint) -> dict[int, int]:
    """How many nodes of the forward read each activation that is given, but the first one."""
    forward = of_forward(joint.graph, joint.outputs)
    inputs = joint.placeholders[: len(joint.inputs)]
    return {i: sum(user in forward for user in inputs[i].users) for i in range(joint.parameters + 1, len(joint.inputs))}


def _apart(halves: Halves, readers: dict[int, int]) -> tuple[int, ...]:
    """Return the gradients for several readers of an input one by one, and not their sum.

    Other layers read such an input, too (an encoder's states), and autograd adds up all gradients in stock's order.
    """
    repeats: list[int] = []
    for i, count in readers.items():
        node = halves.grads[i]
        parts: list[Node] = []
        while node is not None and count > 1 and node.target is torch.ops.aten.add.Tensor and len(node.users) == 1:
            node, other = node.args[0], node.args[1]  # type: ignore[assignment]
            parts.insert(0, other)  # type: ignore[arg-type]
            count -= 1
        halves.grads[i] = node
        halves.grads += parts
        repeats += [i] * len(parts)
    if repeats:
        # a part that is read on the way stays until it is returned
        halves.backward.graph.output_node().args = (tuple(halves.grads),)
    return tuple(repeats)


def _elements(joint: Joint, halves: Halves) -> int:
    weights = zip(joint.inputs[: joint.parameters], halves.grads, strict=False)
    return sum(x.numel() for x, grad in weights if grad is not None)
