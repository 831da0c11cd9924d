"""A layer that runs by plans: each call looks for its plan, which is made at the first call of its kind."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..graphs.codec_marks import other_codec
from ..graphs.plan import LayerPlan
from ..graphs.sizes import layout
from ..modules.base import is_sharded, recording, settings_of
from ..modules.checkpoint import KeptInput
from ..modules.tiled import tiles_if_checkpointed
from ..ops.autocast import autocast_dtype
from ..ops.region import region_in_progress
from ..ops.snapshot import MERGED, refuse_merges
from ..private_apis import FakeTensor, as_in_first_run
from ..records import applied, rows_left_out
from ..records import checkpointed as is_checkpointed
from . import handing, stages
from .caches import fill_slots
from .function import PlanFunction
from .given import CallArguments, Unknown, first_activation
from .handing import Heads, let_go
from .look import Attributes, LayerLook, kind_of
from .noted import ARGUMENT
from .possible import are_plain_weights, opaque_in, why_not
from .site import LayerSettings
from .stages import Stages, stops_of
from .state import FAILED, State, fails, frozen
from .store import Known, Store, TraceSetting, learn

_requires_grad = attrgetter("requires_grad")
# how many states of a layer (training, evaluation, adapters) are remembered
_STATES = 8
# after how many calls of one form without a plan no further sizes are tried
_TRIES = 2
# how many nodes graphs for any sizes have, after which no further ones are traced for one form: a layer's code may make
# another graph for each number of chunks, and the trace of a thousand nodes takes ten seconds
_MOST_NODES = 2048
# how much a call counts for that whose cache may be the reason
_WITH_CACHE = 0.25


@dataclass
class PlannedLayer:
    """The plans of one layer. Deep-copies and pickles with the layer.

    Attributes:
        store: The plans that it shares with the other layers of the model.
        calls: How many calls ran by plans.
        leaf_calls: How many calls with gradients went module by module.
        why: Why the last of these did.
    """

    store: Store
    calls: int = 0
    leaf_calls: int = 0
    why: str = ""
    _states: list[State] = field(default_factory=list, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # a copy looks its own modules up
        return {**self.__dict__, "_states": []}

    def note(self, layer: nn.Module) -> None:
        """Note a layer that was just patched, so that it is known before its first call how it differs from others."""
        self.store.note(*_kind_of(layer))

    def run(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], keeps: KeptInput | None = None
    ) -> tuple[Any] | None:
        """What the layer returns, in a tuple; None for a call that goes module by module.

        `keeps` is what it keeps of its input, if all else is to be recomputed in backward.
        """
        x = first_activation(args, kwargs)
        if not recording(x):
            return None
        # where a checkpointed region runs again, the layer is what it was in the first run, and so are hooks and
        # reports, which are there in a forward alone
        state, can_run = as_in_first_run(self, lambda plans: plans._looked(layer))
        if not can_run:
            return self._leaf_by_leaf("a module in it has hooks or a forward of its own")
        if state.why_not:
            return self._leaf_by_leaf(state.why_not)
        if region_in_progress() is not None:
            return None
        try:
            given = CallArguments(args, kwargs)
        except Unknown as reason:
            return self._leaf_by_leaf(str(reason))
        weights: list[Any] = list(map(dict.get, *state.weights))
        if not are_plain_weights(weights):
            return self._leaf_by_leaf("a weight is no plain parameter")
        if not given.tensors or not (any(map(_requires_grad, given.tensors)) or any(map(_requires_grad, weights))):
            return None
        # embeddings are given indices
        rows = rows_left_out(given.tensors[0] if x is None else x, indices=x is None)
        autocast = autocast_dtype(_floating_point(weights) if x is None else x)
        known = self._known(layer, state, given, weights, keeps, type(rows), autocast)
        if isinstance(known.plan, str):
            return self._leaf_by_leaf(known.plan)
        found = self._run(layer, state, known, known.plan, given, weights, keeps)
        if isinstance(found, str):
            return self._leaf_by_leaf(found)
        self.calls += 1
        # weights are read again in backward, if only to be cast
        again = known.plan.makes_weights or keeps is not None or autocast is not None
        if state.adapters and (again or is_checkpointed()):
            refuse_merges(state.adapters, found[0])
        return found

    def known(self) -> list[Known]:
        """What is known of the calls of this layer so far, in all of its states; each plan once."""
        found = [calls for state in self._states for calls in state.known.values() if isinstance(calls, Known)]
        return list({id(known): known for known in found}.values())

    def why_not_compiled(self) -> list[str]:
        """Why plans of this layer run as they are that should be compiled."""
        plans = (known.plan for known in self.known())
        codes = (code for plan in plans if isinstance(plan, LayerPlan) for code in plan.compiled.values())
        return list(dict.fromkeys(code for code in codes if isinstance(code, str)))

    def _leaf_by_leaf(self, why: str) -> tuple[Any] | None:
        """Note for the report why a call goes module by module."""
        self.leaf_calls, self.why = self.leaf_calls + 1, why
        return None

    def _looked(self, layer: nn.Module) -> tuple[State, bool]:
        state = self._state(layer)
        return state, state.look.can_run()

    def _state(self, layer: nn.Module) -> State:
        for i, state in enumerate(self._states):
            if state.look.holds():
                if i:
                    self._states.insert(0, self._states.pop(i))
                return state
        base, attributes = _kind_of(layer)
        kind, known = self.store.kind(base, attributes)
        look, weights, reason = LayerLook(layer), _places(layer), why_not(layer, other_codec(layer))
        adapters, tiles = _adapters(layer), tiles_if_checkpointed(layer)
        state = State(look, kind, known, base, attributes, weights, adapters, tiles, reason)
        self._states = [state, *self._states[: _STATES - 1]]
        return state

    def _known(
        self,
        layer: nn.Module,
        state: State,
        given: CallArguments,
        weights: list[Any],
        keeps: KeptInput | None,
        left_out: type,
        autocast: torch.dtype | None,
    ) -> Known:
        key = state.key(given, weights, keeps, left_out, autocast)
        last, same = state.last
        if same is not None and key == last:
            return same
        known: Known | None = state.known.get(frozen(key))
        if known is None:
            known = self._learned(layer, state, given, key)
            # what the code has looked at is a part of the key from now on
            key = state.key(given, weights, keeps, left_out, autocast)
            # numbers without a graph are not remembered: there may be others in every step
            if not (state.kind.reads and isinstance(known.plan, str)):
                state.known[frozen(key)] = known
        state.last = key, known
        return known

    def _learned(self, layer: nn.Module, state: State, given: CallArguments, key: list[Any]) -> Known:
        """The plan for a call of new sizes: one that serves any sizes, from the second sizes on."""
        alike = (*map(frozen, key[:-1]), *((x.dim(), layout(x), x.dtype, x.requires_grad) for x in given.tensors))
        # code that reads numbers has a graph for each of them
        read = state.read(given)
        others: list[Known] = state.known.setdefault(("reading", given.form) if read else alike, [])
        for known in others if not read else ():
            if known.sizes is not None and known.sizes.allow(given.tensors):
                return known
        failed = [known for known in others if isinstance(known.plan, str)]
        if sum(1.0 if not known.passing else _WITH_CACHE for known in failed) >= _TRIES:
            return failed[-1]
        if sum(map(_effort, others)) >= _MOST_NODES:
            return Known("its code makes other graphs for other sizes or numbers, and there are many already")
        differing = self.store.differing(state.base, state.attributes) - state.kind.branched
        seen = state.looked_at(given)
        arguments = {(ARGUMENT, str(i)) for i in range(len(given.integers)) if i not in seen}
        whole = key[2] is type(None)
        batches = self.store.batches and whole and len(others) == 1
        free = None if read or (whole and not others) else _free(given, batches)
        setting = TraceSetting(key[0], key[1], free, None if whole else key[2], tiles=key[3])
        known, looked = learn(layer, given, setting, differing | arguments)
        if looked:
            state.kind.branched |= looked - arguments
            state.kind, state.known = self.store.kind(state.base, state.attributes)
            state.looked_at(given).update(seen, (int(number) for _, number in looked & arguments))
        else:
            others.append(known)
        if known.read:
            state.kind.reads = True
            read |= known.read
        return known

    def _run(
        self,
        layer: nn.Module,
        state: State,
        known: Known,
        plan: LayerPlan,
        given: CallArguments,
        weights: list[Any],
        keeps: KeptInput | None,
    ) -> tuple[Any] | str:
        """What the layer returns, in a tuple; or why the plan cannot be run, or must not have been."""
        real = type(given.tensors[0]) is not FakeTensor
        way, slots, modules = state.use(layer, known, plan, keeps, real)
        slots = [slot.of_call(given.integers) for slot in slots]
        if slots and not all([slot.is_free(given.caches) for slot in slots]):
            return "its cache has keys and values already, or is of another kind"
        inputs = [*weights, *given.tensors]
        inputs += [inputs[i] for i in plan.repeats]
        x = given.tensors[0]
        others: dict[str, Sequence[Any]] = {"mask": given.masks, "integer": given.integers}
        calls = [call.of(module, others, plan.checkpointed) for call, module in zip(known.calls, modules, strict=True)]
        whole = plan.elements <= stages.SLACK or way.compiled
        # a whole MLP needs so much memory that gradients of this size do not raise the peak
        stops = () if whole else stops_of(plan.order, inputs, 0 if plan.tiles else 4 * x.numel())
        run = Stages(stops, inputs, calls) if stops else None
        heads: Heads | None = {} if 3 * x.numel() >= handing.LARGE else None
        link = None if run is None else run.linked(inputs)
        made = applied(PlanFunction, plan, run, heads, link, is_sharded(layer), way, calls, *inputs)
        assert known.returned is not None
        if heads is not None:
            made = tuple([y if i in plan.ungraded else let_go(heads, i, y) for i, y in enumerate(made)])
        checks, written = plan.extra
        count = len(made) - len(written) - len(checks)
        if checks and real and fails(known, tuple(map(bool, made[count:])) != checks):
            return FAILED
        if slots:
            end, count = count, count - sum(slot.size for slot in slots)
            fill_slots(slots, given.caches, made[count:end])
        return (known.returned.put_together(made[:count], [*given.tensors, *given.caches, *given.integers]),)


def _floating_point(weights: list[Any]) -> Tensor:
    """The first of some weights that has such numbers."""
    found: Tensor = next(w for w in weights if w is not None and w.is_floating_point())
    return found


def _free(given: CallArguments, batches: bool) -> list[range]:
    """The dimensions of each tensor that may have any size; `batches`: the first one of several alone."""
    return [range(x.dim() > 1) if batches else range(x.dim()) for x in given.tensors]


def _effort(known: Known) -> int:
    """How long the graph is that was traced for any sizes, or for some numbers; 0 if there is none."""
    if (known.sizes is None and not known.read) or not isinstance(known.plan, LayerPlan):
        return 0
    return len(known.plan.halves.forward.graph.nodes) + len(known.plan.halves.backward.graph.nodes)


def _kind_of(layer: nn.Module) -> tuple[Hashable, Attributes]:
    settings = settings_of(layer)
    assert isinstance(settings, LayerSettings)
    return kind_of(layer, settings.of_plan)


def _places(layer: nn.Module) -> tuple[list[dict[str, Any]], list[str]]:
    """Where the layer's parameters and buffers are, in the order of a snapshot, but for those of opaque modules: the
    dictionaries that hold them, and their names there."""
    found: dict[int, tuple[dict[str, Any], str]] = {}
    opaque = set(opaque_in(layer))
    for module in (x for x in layer.modules() if x not in opaque):
        for held in (module._parameters, module._buffers):
            for name, x in held.items():
                if x is not None:
                    found.setdefault(id(x), (held, name))
    return [held for held, _ in found.values()], [name for _, name in found.values()]


def _adapters(layer: nn.Module) -> list[nn.Module]:
    """The modules that may merge an adapter into a weight, which no version shows."""
    return [module for module in layer.modules() if MERGED in vars(module)]
