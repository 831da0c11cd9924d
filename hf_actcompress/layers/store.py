"""The plans of a model: one per kind of layer and of call, which layers of one kind share."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..codecs import IDENTITY
from ..compilation import traced_plan
from ..errors import first_line
from ..graphs.checkpointed import Recompute, calls_in
from ..graphs.codec_marks import attention_marks, name_codecs, other_codec
from ..graphs.packing import Others
from ..graphs.plan import LayerPlan, make_plan
from ..graphs.replaced import Replaced
from ..graphs.rows import TokenSizes
from ..graphs.sizes import Sizes
from ..graphs.trace import Free, Joint, NotTraced, trace, within
from ..graphs.trial import try_plan
from ..models.attention_interface import foreign_functions_are_nodes
from ..modules.base import settings_of, stock_type
from ..ops import layer_calls
from ..ops.kernel_nodes import left_to_a_compiler
from ..ops.snapshot import Snapshot
from ..ops.traced_tiles import traced_in_tiles
from ..private_apis import without_dispatch_modes, without_saved_tensor_hooks
from ..private_apis.graphs import ONE_TRACE, code_when_asked
from ..records import Padding
from ..roles import RUN_BY_PLANS, Role
from .caches import Slot, Updates, is_filled, items_of, note_changes, stand_in
from .effects import without_effects
from .given import CallArguments, Returned, Unknown
from .look import Attributes
from .noted import ARGUMENT, Data, Number, noted_in
from .opaque_linear import node_of
from .possible import opaque_in


@dataclass
class Known:
    """What is known of one kind of call.

    Attributes:
        plan: The plan; or why there is none.
        returned: What it returns.
        sizes: The sizes that it serves; None: those with which it was traced.
        passing: Whether there is none because a cache is filled, which later calls of the form may not have.
        calls: What it calls of which no tracer sees the inside: attention, quantised linear layers, MLPs in tiles; and
            BatchNorms, which count batches.
        read: The weights and tensors, by place, for whose numbers alone it is.
        missed: How many more calls failed its checks than passed them, of late.
        slots: Where it puts keys and values. The index in each may be the place of one: a module's path and an
            attribute.
    """

    plan: LayerPlan | str
    returned: Returned | None = None
    slots: tuple[Slot, ...] = ()
    sizes: Sizes | None = None
    calls: tuple[layer_calls.LayerCall, ...] = ()
    passing: bool = False
    read: frozenset[int] = frozenset()
    missed: int = 0


@dataclass
class Kind:
    """One kind of layer.

    Attributes:
        branched: The attributes, by module and name, that differ between layers and that the code looked at.
        reads: Whether the code has read numbers in tensors.
    """

    branched: set[tuple[str, str]] = field(default_factory=set)
    reads: bool = False
    # by the attributes that the code looked at, or that all layers share: what is known of each call
    known: dict[Hashable, dict[Hashable, Any]] = field(default_factory=dict)


class TraceSetting(NamedTuple):
    """How a call is traced.

    Args:
        autocast: The dtype of autocast; None without it.
        again: What backward computes again.
        free: Which dimensions of the tensors that are given may have any size.
        left_out: Which rows are left out (`Padding` or `RepeatedRows`); None: none.
        tiles: Whether MLPs of a checkpointed layer are computed in tiles.
    """

    autocast: torch.dtype | None
    again: Recompute
    free: Free
    left_out: type | None
    tiles: bool = False


_shared: ContextVar[Store | None] = ContextVar("plans of several copies of a model", default=None)


class Store:
    """The plans of a model's layers. A copy or a pickle of a model begins without plans.

    Args:
        batches: Whether the first graph for any sizes is one for any batch only: few estimates look at another length.
    """

    def __init__(self, batches: bool = False) -> None:
        self.batches = batches
        self._kinds: dict[Hashable, Kind] = {}
        # for each kind, the values of each attribute in its layers
        self._values: dict[Hashable, dict[tuple[str, str], set[Hashable]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        twin: Store = memo.setdefault(id(self), Store(self.batches))
        return twin

    def __reduce__(self) -> Any:
        return Store, (self.batches,)

    def note(self, base: Hashable, attributes: Attributes) -> None:
        """Note a layer of a kind, so that it is known which of its attributes differ from those of its siblings."""
        of = self._values.setdefault(base, {})
        for place, value in attributes.items():
            values = of.setdefault(place, set())
            # two are enough to know that it differs, and one that changes in every step must not fill the memory
            if len(values) < 2:
                values.add(value)

    def differing(self, base: Hashable, attributes: Attributes) -> set[tuple[str, str]]:
        """The attributes that layers of this kind do not share."""
        self.note(base, attributes)
        return {place for place, values in self._values[base].items() if len(values) > 1}

    def kind(self, base: Hashable, attributes: Attributes) -> tuple[Kind, dict[Hashable, Any]]:
        """The kind of a layer, and what is known of the calls of such layers with its attributes."""
        kind = self._kinds.setdefault(base, Kind())
        differing = self.differing(base, attributes) - kind.branched
        key = frozenset((place, value) for place, value in attributes.items() if place not in differing)
        return kind, kind.known.setdefault(key, {})


@contextmanager
def plans_shared(store: Store) -> Iterator[None]:
    """While the block runs, models that are patched share these plans: copies of one model, under any configs."""
    token = _shared.set(store)
    try:
        yield
    finally:
        _shared.reset(token)


def store_for_model() -> Store:
    """The plans of a model that is patched now."""
    return _shared.get() or Store()


def learn(
    layer: nn.Module, given: CallArguments, setting: TraceSetting, places: set[tuple[str, str]]
) -> tuple[Known, set[tuple[str, str]]]:
    """Trace a call of a layer and make its plan. Also returns those of `places` that its code looked at.

    `places` are those of attributes, by module and name, and of integers among the arguments.
    """
    # what watches the training, such as a counter of operations, sees nothing of it
    with ONE_TRACE, without_dispatch_modes(), without_saved_tensor_hooks(), code_when_asked():
        try:
            return _learn(layer, given, setting, places)
        except (NotTraced, Unknown) as reason:
            if any(map(is_filled, given.caches)):
                return Known(f"its cache has keys and values already, or {reason}", passing=True), set()
            if not places:
                return Known(str(reason)), set()
        # a number that is no plain integer, or a module that is of another class, may be the reason
        try:
            known, _ = _learn(layer, given, setting, set())
        except (NotTraced, Unknown) as reason:
            known = Known(str(reason))
        return known, places


def _learn(
    layer: nn.Module, given: CallArguments, setting: TraceSetting, places: set[tuple[str, str]]
) -> tuple[Known, set[tuple[str, str]]]:
    snapshot = _copied(layer)
    noted = noted_in(snapshot, layer, {place for place in places if place[0] != ARGUMENT})
    integers = [Number(n) if (ARGUMENT, str(i)) in places else n for i, n in enumerate(given.integers)]
    noted.update({(ARGUMENT, str(i)): n for i, n in enumerate(integers) if isinstance(n, Number)})
    weights, device = len(snapshot.tensors), given.tensors[0].device.type
    marks, returned, updates = attention_marks(layer), list[Returned](), Updates()

    def call(inputs: list[Any]) -> list[Tensor]:
        updates.clear()
        made.clear()
        caches = [stand_in(cache, i, updates) for i, cache in enumerate(given.caches)]
        tensors = inputs[weights:]
        args, kwargs = given.with_others(tensors, caches, integers)
        autocast = torch.autocast(device, setting.autocast, setting.autocast is not None, cache_enabled=False)
        with Replaced(marks), autocast:
            items = items_of(caches)
            value = snapshot.run(inputs[:weights], *args, **kwargs)
        note_changes(caches, items, updates)
        found = Returned(value, [*tensors, *caches, *integers])
        returned[:] = [found]
        return [*found.tensors, *(x for _, heads in updates for x in heads)]

    inputs = [*snapshot.tensors, *given.tensors]
    others: dict[str, Sequence[Any]] = {"mask": given.masks, "integer": integers}
    own: Any = settings_of(layer)
    rules = left_to_a_compiler(own.compile), traced_in_tiles(setting.tiles)
    with foreign_functions_are_nodes(), rules[0], rules[1], layer_calls.traced_calls(others) as made:
        joint = trace(call, inputs, weights, setting.free, _held(layer), setting.again == Recompute.ALL)
    joint.selective = own.selective
    returned[0].forget()
    slots = tuple(slot._replace(index=_place(slot.index, noted)) for slot, _ in updates)
    plan, sizes = _made(joint, inputs, setting, _others(layer)), None if setting.free is None else Sizes(joint)
    _refuse_again(made, plan)
    return Known(plan, returned[0], slots, sizes, tuple(made), read=joint.read), {
        place for place, one in noted.items() if one.used
    }


def _refuse_again(calls: Sequence[layer_calls.LayerCall], plan: LayerPlan) -> None:
    """Raise NotTraced if backward would run a call again that cannot run again."""
    again = calls_in(plan.halves.backward.graph)
    for number, call in enumerate(calls if plan.checkpointed else ()):
        reason = call.why_not_again(number in again)
        if reason:
            raise NotTraced(reason)


def _copied(layer: nn.Module) -> Snapshot:
    """What runs in a trace: copies of the layer's modules, which note whose nodes they make and name their codecs."""
    opaque_modules = opaque_in(layer)
    snapshot = Snapshot(layer, _code, buffers=True, without=opaque_modules)
    name_codecs(snapshot, layer)
    names = {module: name for name, module in layer.named_modules()}
    for module in opaque_modules:
        snapshot.replace(module, "forward", node_of(module, names[module]))
    for module, name in names.items():
        snapshot.replace(module, layer_calls.PATH, name)
    snapshot.around(lambda module, forward: within(names[module], forward))
    return snapshot


def _others(layer: nn.Module) -> Others | None:
    """What goes through the layer's codec for what no patched module keeps; None if it has none."""
    if other_codec(layer) == IDENTITY:
        return None
    found = {name: settings.role for name, part in layer.named_modules() if (settings := settings_of(part)) is not None}
    # a linear layer keeps its input, and has no codec for what it makes
    inputs_only = (Role.LINEAR, Role.DROPOUT)
    inputs = {name for name, role in found.items() if role in inputs_only}
    rest = {name for name, role in found.items() if role not in (*inputs_only, *RUN_BY_PLANS, Role.IN_PARTS)}
    return Others(frozenset(inputs), frozenset(rest), attention=settings_of(layer).codec != IDENTITY)  # type: ignore[union-attr]


def _made(joint: Joint, inputs: list[Tensor], setting: TraceSetting, others: Others | None) -> LayerPlan:
    """The plan of a joint graph, tried once. Whatever goes wrong: the layer runs module by module."""
    rows = None if setting.left_out is None else TokenSizes(joint, setting.left_out is Padding)
    try:
        plan = make_plan(joint, setting.again, others, rows)
        with traced_plan():
            try_plan(plan, joint, inputs)
    except NotTraced:
        raise
    except Exception as error:
        raise NotTraced(f"its graph cannot be run ({first_line(error)})") from error
    return plan


def _code(module: Any) -> Any:
    """The stock forward of a copy of a layer."""
    return partial(without_effects, module, partial(stock_type(module).forward, module))


def _held(layer: nn.Module) -> set[int]:
    """The storages of tensors that a graph must not hold: what modules have as plain attributes, and weights that code
    reads in another way than through the module."""
    attributes = (value for module in layer.modules() for value in vars(module).values())
    values = [value for value in attributes if isinstance(value, Tensor)]
    return {value.untyped_storage()._cdata for value in (*values, *layer.parameters(), *layer.buffers())}


def _place(index: Any, noted: dict[tuple[str, str], Number | Data]) -> tuple[str, str] | int:
    for place, one in noted.items():
        if one is index:
            return place
    if type(index) is not int:
        raise NotTraced("its cache is asked for a layer without an index")
    return index
