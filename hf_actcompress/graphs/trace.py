"""The joint graph of a module's call: its forward and autograd's own backward of it, traced once on fake tensors.

Nothing in the module's code is recognised by a name. Patched modules inside run their stock code and mark the tensors
that they keep (`compilation/marks.py`), as they do for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Interpreter, Node, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.graph import CodeGen
from torch.overrides import TorchFunctionMode

from ..compilation import is_traced, traced_plan
from ..compilation.policy import is_attention
from ..errors import first_line
from ..ops.autocast import autocast_off
from ..private_apis import FakeTensorMode
from ..private_apis.graphs import any_sizes, without_logs_of_fakes
from ..reference.other_generators import OtherGenerators
from .batch_norms import updates_statistics
from .draws import DROPOUTS
from .extra_outputs import ExtraOutputs, writes_as_outputs
from .redraw import has_unread_draws, split_draws
from .replaced import PRODUCTS, Replaced
from .tidied import name_placeholders, once_each_size, without_copies, without_examples
from .values import Reading, may_be_read

aten = torch.ops.aten
# the name of an annotation: the module whose forward runs
_MODULE = "actcompress_module"
# that of a copy that a cache makes
LAID_OUT = "actcompress_laid_out"
# calls of torch in a forward; a layer with more is a loop over tokens or a block of blocks, and its trace takes long.
# A layer of T5 with DoRA makes more than half as many
MOST_CALLS = 1536
# what a layer is given and returns, as a flat list of tensors
Call = Callable[[list[Any]], list[Tensor]]
# for each tensor of a call: its dimensions that may have any size; None: none may
Free = Sequence[Collection[int]] | None


# the layer runs module by module then, and the report says why
without_logs_of_fakes(lambda: not is_traced())


class NotTraced(Exception):
    """Why a call has no graph."""


@dataclass
class Joint:
    """A joint graph.

    Attributes:
        module: Its placeholders are the inputs, then the gradients of the outputs ("tangents"). It returns the outputs,
            then the gradients of the inputs, with None for those that get none.
        inputs: The inputs that it was traced with, without data.
        tangents: The same for the gradients of the outputs.
        mode: The mode that made them.
        parameters: How many of the first inputs are weights.
        ungraded: The outputs that have no gradient, by place.
        selective: Whether products of activations are recomputed in backward.
        read: The inputs, by place, whose numbers the code has read. The graph is for these numbers.
        extra: What the last outputs are for.
    """

    module: GraphModule
    inputs: list[Tensor]
    tangents: list[Tensor]
    mode: FakeTensorMode
    parameters: int
    ungraded: tuple[int, ...]
    selective: bool = True
    read: frozenset[int] = frozenset()
    extra: ExtraOutputs = ExtraOutputs()

    @property
    def outputs(self) -> int:
        """How many outputs the forward has."""
        return len(self.tangents)

    @property
    def placeholders(self) -> list[Node]:
        """The placeholders of the inputs, then those of the tangents."""
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def graph(self) -> Graph:
        """The graph of the module."""
        return self.module.graph


def trace(
    call: Call, inputs: Sequence[Tensor], parameters: int, free: Free, held: AbstractSet[int], attention: bool
) -> Joint:
    """Trace a call.

    Args:
        call: Takes tensors without data in the place of `inputs`, and returns all tensors that the module returns.
        inputs: The weights and what is given. Only their shapes, dtypes, devices and wishes for a gradient are read;
            and of small integers the numbers, if the code does so.
        parameters: How many of them, the first ones, are weights, whose sizes never change.
        free: Which dimensions of the others may have any size, up to guards in `mode.shape_env`.
        held: The storages of tensors that modules hold as plain attributes.
        attention: Whether attention may run again, and draw what it drew.

    Raises:
        NotTraced: The code reads data, or does what torch cannot trace.
    """
    symbols = None if free is None else ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols)
    mode.cache_enabled = symbols is None
    fake = [_fake(mode, x, free[i - parameters] if free and i >= parameters else ()) for i, x in enumerate(inputs)]
    joint = _Joint(call, inputs, DROPOUTS if symbols is None else {**DROPOUTS, **PRODUCTS})
    generators = OtherGenerators()
    try:
        # the call itself says under which autocast it runs; its backward runs without
        with mode, traced_plan(), autocast_off(inputs[-1].device.type), traceback.preserve_node_meta():
            module = make_fx(joint, _allow_non_fake_inputs=True)(fake)
            _tangents_are_inputs(module.graph, len(joint.tangents))
            if any(map(is_written, module.graph.nodes)):
                module = make_fx(_functional(module), _allow_non_fake_inputs=True)(fake, joint.tangents)
                # inputs and outputs are flat lists, and of others than when it was traced
                module.graph.set_codegen(CodeGen())
                joint.written = writes_as_outputs(module.graph, parameters, joint.tangents)
    except (NotTraced, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NotTraced(f"it cannot be traced ({first_line(error)})") from error
    if not generators.are_as_they_were():
        generators.restore()
        raise NotTraced("its code draws numbers from numpy or Python's random")
    name_placeholders(module.graph, len(fake))
    _note_modules(module.graph)
    without_copies(module.graph)
    without_examples(module.graph)
    once_each_size(module.graph)
    if has_unread_draws(module.graph):
        raise NotTraced("its code draws numbers that it does not use")
    split_draws(module.graph, attention)
    _refuse(module, held)
    extra, read = joint.extra(module.graph), frozenset(joint.read)
    return Joint(module, fake, joint.tangents, mode, parameters, tuple(joint.ungraded), read=read, extra=extra)


class _Joint:
    """The function that is traced: inputs -> (outputs, gradients of inputs, gradients of outputs)."""

    def __init__(self, call: Call, real: Sequence[Tensor], replaced: Mapping[Any, Any]) -> None:
        self._call, self._real, self._replaced = call, real, replaced
        self.tangents: list[Tensor] = []
        self.ungraded: list[int] = []
        self.read: set[int] = set()
        self.written: list[int] = []
        self.checks: list[bool] = []

    def __call__(self, inputs: list[Tensor]) -> list[Any]:
        given = [x.detach().requires_grad_(real.requires_grad) for x, real in zip(inputs, self._real, strict=True)]
        reading = Reading({i: (given[i], real) for i, real in enumerate(self._real) if may_be_read(real)})
        with torch.enable_grad(), Replaced(self._replaced), _Few(), reading:
            outputs = self._call(given)
        self.read = reading.read
        self.checks = [assumed for _, assumed in reading.checks]
        outputs = [*outputs, *(found for found, _ in reading.checks)]
        # what shapes they have is known only now; they become inputs of the graph
        self.tangents = [torch.empty_like(y, memory_format=torch.contiguous_format) for y in outputs]
        self.ungraded = [i for i, y in enumerate(outputs) if not y.requires_grad]
        pairs = [(y, dy) for y, dy in zip(outputs, self.tangents, strict=True) if y.requires_grad]
        if not pairs:
            raise NotTraced("nothing that it returns has a gradient")
        wanted = [x for x in given if x.requires_grad]
        found = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
        grads = iter(found)
        own = [next(grads) if x.requires_grad else None for x in given]
        return [*(y.detach() for y in outputs), *own, *self.tangents]

    def extra(self, graph: Graph) -> ExtraOutputs:
        """What the last outputs of the graph are for. Raises NotTraced for what cannot be undone after a check."""
        if self.checks and (self.written or any(map(updates_statistics, graph.nodes))):
            raise NotTraced("its code looks at what it computes, and writes into weights or buffers")
        outputs = range(len(self.tangents))
        self.ungraded += outputs[len(outputs) - len(self.written) :]
        return ExtraOutputs(tuple(self.checks), tuple(self.written))


def _tangents_are_inputs(graph: Graph, count: int) -> None:
    """Make the last outputs of a graph, which are the gradients of its other outputs, inputs of it."""
    output, *_, last = graph.output_node(), *graph.find_nodes(op="placeholder")
    values: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    output.args = (values[: len(values) - count],)
    for made in values[len(values) - count :]:
        with graph.inserting_after(last):
            last = graph.placeholder(made.name)
        last.meta = made.meta
        made.replace_all_uses_with(last)
        graph.erase_node(made)
    # inputs and outputs are flat lists, and of others than when it was traced
    graph.set_codegen(CodeGen())


class _Few(TorchFunctionMode):
    """Raises NotTraced in a forward of more than `MOST_CALLS` calls. (An error in a dispatch mode can end Python.)"""

    count = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # what reads an attribute of a tensor is no call
        self.count += getattr(function, "__name__", "") != "__get__"
        if self.count > MOST_CALLS:
            raise NotTraced(f"it makes more than {MOST_CALLS} calls of torch")
        return function(*args, **(kwargs or {}))


def _functional(module: GraphModule) -> Callable[..., Any]:
    """The graph without ops that write in place, as far as they write on its own tensors."""
    # interpreted node by node, each node keeps its module
    function = functionalize(_InPlaceForAnySizes(module).run, remove="mutations")
    return lambda inputs, tangents: function(*inputs, *tangents)


class _InPlaceForAnySizes(Interpreter):
    """Runs a graph. In torch 2.11 some ops in place (`clamp_`, `exponential_`) ask for sizes as numbers, unless Python
    composes them."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        schema = getattr(target, "_schema", None)
        with any_sizes() if schema is not None and schema.name.endswith("_") else nullcontext():
            return super().call_function(target, args, kwargs)


def _fake(mode: FakeTensorMode, x: Tensor, free: Collection[int]) -> Tensor:
    kinds = [DimDynamic.DYNAMIC if i in free else DimDynamic.STATIC for i in range(x.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds) if mode.shape_env is not None else None
    return mode.from_tensor(x.detach(), symbolic_context=context)


def within(module: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose nodes are noted as those of the module of that name."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        with traceback.annotate({_MODULE: module}):
            return forward(*args, **kwargs)

    return noted


def _note_modules(graph: Graph) -> None:
    for node in graph.nodes:
        notes = node.meta.pop("custom", None) or {}
        if _MODULE in notes:
            # as a compiler notes it
            node.meta["nn_module_stack"] = {notes[_MODULE]: notes[_MODULE]}
        if LAID_OUT in notes and all(user.op == "output" or is_attention(user) for user in node.users):
            # a fused attention gives the same numbers wherever they lie
            node.target = aten.alias.default
            node.args, node.kwargs = node.args[:1], {}


def _refuse(module: GraphModule, held: AbstractSet[int]) -> None:
    """Raise NotTraced if the graph holds a tensor of the module, or writes into what it is given."""
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.users:
            value = getattr(module, str(node.target))
            if isinstance(value, Tensor) and value.untyped_storage()._cdata in held:
                raise NotTraced("its code reads a tensor that is none of its parameters, buffers or arguments")
        if is_written(node):
            raise NotTraced(f"its code writes in place ({node.target})")


def is_written(node: Node) -> bool:
    """Whether a node writes into one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
