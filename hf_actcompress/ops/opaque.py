"""What a tracer cannot look into, as one node of a layer's graph: attention by flash, flex and hub kernels, and ours
for packed rows; linear layers with quantised weights.

In a trace the node says what shapes come out. When the graph runs, the function itself is called, under autograd: what
it keeps is kept by its own small graph, which crosses from the layer's forward to its backward (`Ran`). The layer's
backward runs the backward of that graph.

What the call is given may be other in each call of the layer: tensors are the node's inputs, and masks without memory
and integers are looked up among the arguments of the layer's call (`OpaqueCall`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..private_apis import above_autograd
from ..records import current
from .autocast import autocast_dtype
from .layer_calls import PATH, calls_so_far, running_call, state
from .nodes import node
from .opaque_graph import Box, End, Enter, Ran, keeping_places, run_backward
from .snapshot import with_attributes

# says how many features and which dtype a linear layer returns, of what it is given and the dtype of autocast
Features = Callable[[Tensor, torch.dtype | None], tuple[int, torch.dtype]]
_NOTHING = nullcontext()


# a call of an opaque function: of its tensors, the output and what crosses to backward. The second argument says which
# of the tensors that want a gradient its backward is given again
Run = Callable[[Sequence[Tensor], Sequence[int]], tuple[Tensor, Ran]]


class _Place(NamedTuple):
    """Stands for an argument: a tensor of the node, or what the layer's call is given at that place."""

    kind: str
    number: int


@dataclass(frozen=True)
class OpaqueCall:
    """One call of an opaque function in a layer's code.

    Attributes:
        function: The function. It returns the output first.
        path: The module that it is given first, by its name in the layer.
        leaves, tree: Its other arguments.
        wanted: Which of its tensors want a gradient.
        autocast: The device and the dtype of autocast in the forward; None without it.
        draws: Whether it has dropout.
    """

    function: Callable[..., Any]
    path: str
    leaves: tuple[Any, ...]
    tree: Any
    wanted: tuple[bool, ...]
    autocast: tuple[str, torch.dtype] | None
    draws: bool

    def of(self, module: nn.Module, given: Mapping[str, Sequence[Any]], runs_again: bool) -> Run:
        """The call in one call of a layer, whose attention or linear layer is `module`.

        `runs_again`: whether the backward calls the function once more, with the module as it is now.
        """
        if runs_again:
            state = vars(module)
            own = {name: dict(state[name]) for name in ("_parameters", "_buffers")}
            module = with_attributes(type(module), {**state, **own})

        def run(tensors: Sequence[Tensor], again: Sequence[int]) -> tuple[Tensor, Ran]:
            with above_autograd(), torch.enable_grad():
                graded = [x for x, w in zip(tensors, self.wanted, strict=True) if w]
                box = Box([(x.shape, x.dtype) for x in graded])
                start = tensors[0].new_empty(0).requires_grad_()
                entered = iter(Enter.apply(box, start, *graded))  # type: ignore[no-untyped-call]
                own = [next(entered) if w else x for x, w in zip(tensors, self.wanted, strict=True)]
                places = {**given, "tensor": own}
                leaves = [places[x.kind][x.number] if isinstance(x, _Place) else x for x in self.leaves]
                args, kwargs = pytree.tree_unflatten(leaves, self.tree)
                device, dtype = self.autocast or (own[0].device.type, None)
                within = nullcontext() if current.watcher is None else current.watcher.within(self.path)
                keeping = keeping_places(box, [graded[i] for i in again]) if again else _NOTHING
                cast = torch.autocast(device, dtype, enabled=dtype is not None, cache_enabled=False)
                with within, keeping, cast:
                    out: Tensor = self.function(module, *args, **kwargs)[0]
                return out.detach(), Ran(End.apply(box, out), box)  # type: ignore[no-untyped-call]

        return run

    def why_not_again(self, again: bool) -> str:
        return "its attention draws numbers that no second run can draw again" if self.draws and again else ""


def attention(
    function: Callable[..., Any], given: bool, module: nn.Module, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What an attention function of transformers returns, in a trace: [B, T, H, D] as one node, and no probabilities.

    Args:
        given: Whether its backward may be given queries, keys and values again: whether it keeps them and no codes.
        function: The function. It is called with the module and the other arguments.
        module: The copy of an attention module.
        args: Queries, keys and values [B, H, T, D], and whatever else the function takes.
        kwargs: The same.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors: list[Tensor] = []
    places = {id(x): _Place(kind, i) for kind, values in state.given.items() for i, x in enumerate(values)}
    for i, x in enumerate(leaves):
        if id(x) in places:
            leaves[i] = places[id(x)]
        elif isinstance(x, Tensor):
            leaves[i] = _Place("tensor", len(tensors))
            tensors.append(x)
    path, draws = vars(module)[PATH], bool(kwargs.get("dropout"))
    return _node(function, path, tuple(leaves), tree, tensors, draws, given, (ATTEND, ATTEND_BWD)), None


def linear(function: Callable[..., Any], path: str, features: Features, x: Tensor) -> Tensor:
    """What a linear layer returns, in a trace: [..., out] as one node.

    Args:
        function: It is called with the layer and x, and returns the output in a tuple.
        path: The layer, by its name in the layer that is traced.
        features: Says how many features and which dtype the output has, of x and the dtype of autocast.
        x: [..., in].
    """
    dtype = autocast_dtype(x)
    leaves, tree = pytree.tree_flatten(((_Place("tensor", 0),), {}), is_leaf=lambda leaf: isinstance(leaf, _Place))
    return _node(function, path, tuple(leaves), tree, [x], False, False, (LINEAR, LINEAR_BWD), *features(x, dtype))


def _node(
    function: Callable[..., Any],
    path: str,
    leaves: tuple[Any, ...],
    tree: Any,
    tensors: Sequence[Tensor],
    draws: bool,
    given: bool,
    ops: tuple[Any, Any],
    *rest: Any,
) -> Tensor:
    made = calls_so_far()
    dtype = autocast_dtype(tensors[0])
    autocast = None if dtype is None else (tensors[0].device.type, dtype)
    wanted = tuple(x.requires_grad for x in tensors)
    made.append(OpaqueCall(function, path, leaves, tree, wanted, autocast, draws))
    y: Tensor = _Node.apply(ops, len(made) - 1, rest, wanted, given, *tensors)  # type: ignore[no-untyped-call]
    return y


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: tuple[Any, Any],
        number: int,
        rest: tuple[Any, ...],
        wanted: tuple[bool, ...],
        given: bool,
        *tensors: Tensor,
    ) -> Tensor:
        out, ran = ops[0](list(tensors), number, [], *rest)
        ctx.save_for_backward(ran, *(x for x, w in zip(tensors, wanted, strict=True) if w and given))
        ctx.op, ctx.number, ctx.wanted = ops[1], number, wanted
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        ran, *given = ctx.saved_tensors
        found = iter(ctx.op(ran, dout, given, ctx.number))
        return None, None, None, None, None, *(next(found) if wanted else None for wanted in ctx.wanted)


def _attend(tensors: list[Tensor], call: int, given: list[int]) -> tuple[Tensor, Tensor]:
    q, v = tensors[0], tensors[2]
    _note(tensors, call)
    out = q.new_empty((q.size(0), q.size(2), q.size(1), v.size(-1)))
    return out, q.new_empty(1, dtype=torch.uint8)


def _linear(
    tensors: list[Tensor], call: int, given: list[int], features: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    (x,) = tensors
    _note(tensors, call)
    return x.new_empty((*x.shape[:-1], features), dtype=dtype), x.new_empty(1, dtype=torch.uint8)


def _note(tensors: Sequence[Tensor], call: int) -> None:
    if state.made is not None:
        wanted = state.made[call].wanted
        state.likes[call] = [x for x, w in zip(tensors, wanted, strict=True) if w]


def _backward(ran: Tensor, dout: Tensor, given: list[Tensor], call: int) -> list[Tensor]:
    return [torch.empty_like(x) for x in state.likes[call]]


def _run(
    fake: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], number: int, given: list[int], *rest: Any
) -> tuple[Tensor, Ran]:
    """In a graph that runs: the output, and what crosses to backward."""
    run: Run | None = running_call(number, tensors[0])
    if run is not None:
        return run(tensors, given)
    out, _ = fake(tensors, number, given, *rest)
    return out, Ran(out.new_empty(0), Box([(x.shape, x.dtype) for x in tensors if x.is_floating_point()]))


def _nodes(name: str, fake: Callable[..., Any], rest: str = "") -> tuple[Any, Any]:
    """The ops of the forward and the backward."""
    forward = f"opaque_{name}(Tensor[] tensors, int call, int[] given{rest}) -> (Tensor, Tensor)"
    backward = f"opaque_{name}_bwd(Tensor ran, Tensor dout, Tensor[] given, int call) -> Tensor[]"
    run = node(forward, fake, pointwise=False)(partial(_run, fake))
    return run, node(backward, _backward, pointwise=False)(run_backward)


ATTEND, ATTEND_BWD = _nodes("attention", _attend)
LINEAR, LINEAR_BWD = _nodes("linear", _linear, ", int features, ScalarType dtype")
