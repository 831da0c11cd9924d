"""Whether a layer's backward is right without the rows of padding: what is kept of them comes back as zeros.

No gradient reaches padding, so the gradients of a layer's outputs are zero there. A backward is linear in them: as long
as each of its nodes computes a row from that row alone, what is made of gradients stays zero in these rows, whatever is
kept of them, and a sum over all rows gets nothing from them. Attention combines rows. What a real token gets from
padding there is zero if its mask hides padding, which each call checks (`rows.LeftOut`).
"""

from __future__ import annotations

import operator
from collections.abc import Set as AbstractSet
from math import inf, prod
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from ..compilation.policy import is_attention, is_pointwise, is_view, op_name
from ..ops.opaque import ATTEND, ATTEND_BWD
from .divide import Halves
from .draws import DROPPED
from .rows import Axes, LeftOut, TokenSizes
from .trace import NotTraced

# each row of their results comes from the same row of what they are given, if rows are no dimension that they reduce
_APART = {
    "_to_copy", "addmm", "amax", "amin", "cat", "clone", "constant_pad_nd", "embedding_dense_backward",
    "gated_and_bwd", "mean", "mm", "native_layer_norm", "native_layer_norm_backward", "opaque_linear",
    "opaque_linear_bwd", "rms_norm_bwd", "rms_norm_bwd_both", "rms_rstd", "select_backward", "slice_backward", "stack",
    "sum", "var", "var_mean",
}  # fmt: skip
# the same, along the dimension in their second or third argument
_ALONG = {"_log_softmax": 1, "_softmax": 1, "_log_softmax_backward_data": 2, "_softmax_backward_data": 2}
# views that take memory in another way; they keep rows if these are the first dimensions
_RESHAPES = {"_unsafe_view", "reshape", "view"}
# what changes a mask and leaves hidden what it hides
_OF_MASKS = {"_to_copy", "constant_pad_nd", "expand", "slice"}


def left_out(halves: Halves, sizes: TokenSizes, parameters: int, dropped: AbstractSet[Node]) -> LeftOut:
    """What a call has to check, if the rows of `dropped` are left out.

    Args:
        halves: The graphs.
        sizes: The sizes of batch and length.
        parameters: How many of the inputs, the first ones, are weights.
        dropped: The kept nodes that lose rows.

    Raises:
        NotTraced: A row of padding may reach a gradient.
    """
    if not sizes.padding:
        # they come back as they were
        return LeftOut((), ())
    graded = tuple((i, _axes_of(halves.outputs[i], sizes)) for i in sorted(halves.tangents.values()))
    _Rows(halves, sizes, dropped).check()
    inputs = halves.inputs
    attentions = [node for node in halves.forward.graph.nodes if is_attention(node) and node.op == "call_function"]
    return LeftOut(graded, tuple(_mask_of(node, inputs, parameters) for node in attentions))


def _axes_of(output: Node, sizes: TokenSizes) -> Axes:
    axes = sizes.axes(output.meta["val"])
    if axes is None or len(axes) != 2:
        raise NotTraced("rows of it are left out, and it returns a tensor of other rows")
    return axes


def _mask_of(attention: Node, inputs: list[Node], parameters: int) -> int | None:
    if attention.target in (ATTEND, ATTEND_BWD):
        raise NotTraced("rows of it are left out, and its attention is another library's")
    names = [argument.name for argument in attention.target._schema.arguments]  # type: ignore[union-attr]
    given = {**dict(zip(names, attention.args, strict=False)), **attention.kwargs}
    mask: Any = given.get("attn_mask", given.get("attn_bias"))
    if mask is None:
        if not given.get("is_causal"):
            raise NotTraced("rows of it are left out, and its attention has no mask")
        return None
    while mask.op != "placeholder" and (is_view(mask) or op_name(mask) in _OF_MASKS or _is_of_bits(mask)):
        mask = mask.all_input_nodes[0]
    if mask not in inputs[parameters:]:
        raise NotTraced("rows of it are left out, and it computes the mask of its attention")
    return inputs.index(mask)


def _is_of_bits(mask: Node) -> bool:
    """Whether a mask is zero where another one, of bits, is true, and hides all else."""
    numbers = [x.args[0] for x in mask.args[1:] if isinstance(x, Node) and op_name(x) == "scalar_tensor"]
    return op_name(mask) == "where" and numbers == [0, -inf]


class _Rows:
    """Follows the rows through a backward.

    Args:
        halves: The graphs.
        sizes: The sizes of batch and length.
        dropped: The kept nodes that lose rows.
    """

    def __init__(self, halves: Halves, sizes: TokenSizes, dropped: AbstractSet[Node]) -> None:
        self._graph: Graph = halves.backward.graph
        self._sizes = sizes
        # nodes with rows that are wrong where they were left out; those made of gradients have zeros there
        self._rows = {node for node, x in halves.read.items() if x in dropped} | halves.tangents.keys()
        self._gradients = set(halves.tangents)

    def check(self) -> None:
        """Raise NotTraced for the first node that may bring rows together."""
        for node in self._graph.nodes:
            if node.op != "call_function":
                continue
            if any(x in self._gradients for x in node.all_input_nodes):
                self._gradients.add(node)
            if any(x in self._rows for x in node.all_input_nodes):
                self._follow(node)

    def _follow(self, node: Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):
            self._refuse(node, not self._keeps(node, ()))
            self._rows.add(node)
            return
        if not isinstance(value, Tensor):
            # a size
            return
        axes = self._sizes.axes(value)
        self._refuse(node, axes is None or not self._keeps(node, axes))
        if axes:
            self._rows.add(node)
        else:
            # a sum over all rows, to which zeros add nothing
            self._refuse(node, node not in self._gradients)

    def _refuse(self, node: Node, wrong: bool) -> None:
        if wrong:
            raise NotTraced(f"rows of it are left out, and {op_name(node)} may combine them")

    def _keeps(self, node: Node, axes: Axes) -> bool:
        """Whether each row of the result comes from that row alone, or from all rows."""
        name = op_name(node)
        if name in _RESHAPES:
            source: Any = node.args[0]
            return self._reshapes(source.meta["val"], node.meta["val"])
        if name in _ALONG:
            dim: Any = node.args[_ALONG[name]]
            return dim % node.meta["val"].dim() not in axes
        apart = node.target in (operator.getitem, DROPPED) or name in _APART
        return apart or is_view(node) or is_pointwise(node) or (is_attention(node) and node.target is not ATTEND_BWD)

    def _reshapes(self, x: Tensor, y: Tensor) -> bool:
        """Whether a view keeps rows in their order: it flattens or parts the first dimensions, or there is as much
        before each dimension of tokens as it was."""
        axes, after = self._sizes.axes(x), self._sizes.axes(y)
        if {axes, after} == {(0,), (0, 1)}:
            return True
        before, now = ([prod(self._sizes.of(z)[:i]) for i in of or ()] for z, of in ((x, axes), (y, after)))
        return before == now
