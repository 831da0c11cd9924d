"""What a layer runs in place of its own forward: its programs and attentions in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import Codec
from ..models.arguments import cache_in
from ..models.attention import attention_forward
from ..models.empty_cache import empty_layers, fill
from ..records import current, unnetted
from ..reference.device_rules import device_rules
from . import handing
from .arguments import cache_names, position_bias
from .handing import Heads, HeadsHanded, let_go
from .interfaces import call
from .left_out import left_out_of, with_attentions
from .schedule import Part, Schedule, schedule_of, takes_any_order
from .tape import Attend, Given, Tape
from .whole import Whole, whole_of


@dataclass
class LayerCode:
    """What a layer runs under one autocast.

    Attributes:
        whole: All of it as one program, for calls whose attention a kernel runs; None: never.
        parts: Programs and attentions, in order.
        attentions: The module of each attention; None for a program.
        keywords: For each attention, its keywords -> the function that reads each off its module.
        heads: For each program, which of its outputs the next attention takes.
        places: The dictionaries and names of all parameters, in the order of `whole`.
        weights: The same for each program.
        inputs: The name of each tensor that is given -> its value.
        biases: The arguments that are position biases, and the attention that makes each if it is not given.
        masks: The arguments that are masks.
        cached: Whether its code reads a cache.
        angles: The width of cosines and sines.
        values: How many values there are.
        result: The value that is returned.
        returns: What the layer returns beside it, in a tuple; None if it returns a tensor.
        again: Whether it may be made again in backward, where it is checkpointed.
        any_order: Whether its input may lie in memory in any order.
        another: Whether its attention is a function that we have no code for, which may look at any token.
        dtype: The dtype of the layer's input.
        autocast: The dtype of products under autocast; None without.
    """

    whole: Whole | None
    parts: Schedule
    attentions: tuple[Any, ...]
    keywords: tuple[Mapping[str, Callable[[Any], Any]], ...]
    heads: tuple[tuple[int, ...], ...]
    places: tuple[tuple[dict[str, Any], str], ...]
    weights: tuple[tuple[tuple[dict[str, Any], str], ...], ...]
    inputs: dict[str, int]
    biases: tuple[tuple[str, Any], ...]
    masks: frozenset[str]
    cached: bool
    angles: int
    values: int
    result: int
    returns: tuple[Any, ...] | None
    again: bool
    any_order: bool
    another: bool
    dtype: torch.dtype
    autocast: torch.dtype | None

    @classmethod
    def of(cls, layer: nn.Module, tape: Tape, autocast: torch.dtype | None) -> LayerCode:
        parts, modules, whole = schedule_of(tape), dict(layer.named_modules()), whole_of(tape)
        names = chain(*(p.parameters for p in parts if isinstance(p, Part))) if whole is None else whole.part.parameters
        return cls(
            whole,
            parts,
            tuple(modules[part.module] if isinstance(part, Attend) else None for part in parts),
            tuple(
                {name: _reader(modules[part.module], name, value) for name, value in part.keywords}
                if isinstance(part, Attend)
                else {}
                for part in parts
            ),
            tuple(_heads(part, later) for part, later in zip_longest(parts, parts[1:])),
            tuple(_place(modules, name) for name in names),
            tuple(
                tuple(_place(modules, name) for name in part.parameters) if isinstance(part, Part) else ()
                for part in parts
            ),
            tape.inputs,
            _biases(tape, modules),
            frozenset(entry.mask for entry in tape.entries if isinstance(entry, Attend)),
            bool(cache_names(layer)),
            tape.metas[tape.inputs["cos"]].size(-1),
            len(tape.metas),
            tape.result,
            tape.returns,
            tape.lossless and tape.again,
            takes_any_order(tape),
            tape.calls_another,
            tape.metas[tape.inputs["x"]].dtype,
            autocast,
        )

    def run(
        self, x: Tensor, weights: list[Any], kwargs: dict[str, Any], sharded: bool, checkpointed: Codec | None
    ) -> tuple[Any] | None:
        """What the layer returns, in a tuple; None for a call that this code cannot run.

        `weights` are the parameters in `places`. `sharded` says whether their memory is freed when the layer has run.
        """
        y = None
        own = self.whole is not None and self.whole.own
        if self.biases:
            kwargs = self._with_biases(x, kwargs)
        if self.again or checkpointed is None:
            y = self._as_a_whole(x, weights, kwargs, sharded, checkpointed)
        if y is None and checkpointed is None and not own and not (self.another and left_out_of(x) is not None):
            y = self._in_parts(x, kwargs, sharded)
        if y is None:
            return None
        if self.returns is None:
            return (y,)
        return ((y, *(kwargs[item.name] if isinstance(item, Given) else item for item in self.returns)),)

    def _with_biases(self, x: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments, with the position biases that the attentions would make themselves."""
        found = dict(kwargs)
        for name, module in self.biases:
            if found.get(name) is None:
                keys = x if name == "position_bias" else kwargs["encoder_hidden_states"]
                dtype = self.autocast or x.dtype
                found[name] = position_bias(module, x.size(1), keys.size(1), x.device, dtype)
        return found

    def _as_a_whole(
        self, x: Tensor, weights: list[Any], kwargs: dict[str, Any], sharded: bool, checkpointed: Codec | None
    ) -> Tensor | None:
        """The result of the layer as one program; None for a call that cannot run so."""
        whole, cache = self.whole, cache_in(kwargs.values())
        if whole is None:
            return None
        masks = [kwargs.get(name) for name in whole.masks]
        kernel = whole.kernel(x, masks, self.autocast)
        if kernel is None:
            return None
        left_out = left_out_of(x)
        if left_out is not None:
            left_out = with_attentions(left_out, masks, whole.causal)
            if left_out is None:
                return None
        indices = [] if cache is None else [m.layer_idx for m in self.attentions if m is not None]
        layers = None if cache is None else empty_layers(cache, indices)
        if cache is not None and layers is None and (not whole.own or len(indices) > 1):
            return None
        part = whole.part if cache is None else whole.cached
        ins = self._given(part.ins, x, kwargs, whole.given_masks(masks, kernel, self.autocast))
        heads: Heads | None = {} if 3 * x.numel() >= handing.LARGE else None
        found = part.program([*ins, *weights], self.autocast, sharded, heads, kernel, left_out, checkpointed)
        place = 0
        if cache is not None:
            place, *others = whole.outputs
            fill(cache, layers, [found[i] for i in others], indices[0])
        y = found[place]
        if heads is not None:
            # autograd's engine would hold the gradient of the result until the program's backward is done
            y = let_go(heads, place, y)
        return y  # type: ignore[no-any-return]

    def _given(self, values: tuple[int, ...], x: Tensor, kwargs: dict[str, Any], masks: dict[int, Any]) -> list[Any]:
        """What the layer is given, in the order of `values`."""
        angles = kwargs.get("position_embeddings") or (None, None)
        named = {**kwargs, "x": x, "cos": angles[0], "sin": angles[1]}
        given = {**masks, **{value: named.get(name) for name, value in self.inputs.items()}}
        return [given[value] for value in values]

    def _in_parts(self, x: Tensor, kwargs: dict[str, Any], sharded: bool) -> Tensor:
        v: list[Any] = [None] * self.values
        left_out = left_out_of(x)
        v[self.inputs["x"]] = x
        angles = kwargs.get("position_embeddings")
        if angles is not None:
            v[self.inputs["cos"]], v[self.inputs["sin"]] = angles
        for i, part in enumerate(self.parts):
            if isinstance(part, Attend):
                v[part.out] = self._attend(i, part, v, kwargs)
            else:
                heads: Heads | None = {} if self.heads[i] and 3 * x.numel() >= handing.LARGE else None
                weights = [place.get(name) for place, name in self.weights[i]]
                found = part.program(
                    [*[v[j] for j in part.ins], *weights], self.autocast, sharded, heads, left_out=left_out
                )
                for j, y in zip(part.outs, found, strict=True):
                    v[j] = y
                if heads is not None:
                    self._hand_heads(i, heads, v)
        return v[self.result]  # type: ignore[no-any-return]

    def _hand_heads(self, index: int, heads: Heads, v: list[Any]) -> None:
        """Let autograd leave the gradients of queries, keys and values in `heads`, where the program can free them."""
        part = self.parts[index]
        assert isinstance(part, Part)
        values = [part.outs[place] for place in self.heads[index]]
        if all(v[j].requires_grad for j in values):
            aliases = HeadsHanded.apply(heads, self.heads[index], *(v[j] for j in values))  # type: ignore[no-untyped-call]
            for j, y in zip(values, aliases, strict=True):
                v[j] = y

    def _attend(self, index: int, part: Attend, v: list[Any], kwargs: dict[str, Any]) -> Tensor:
        module = self.attentions[index]
        q, k, value = (v[i] for i in part.ins)
        cache = cache_in(kwargs.values())
        if cache is not None:
            k, value = cache.update(k, value, module.layer_idx)
        options = {name: read(module) for name, read in self.keywords[index].items()}
        # the net (`records.net`) saves memory only where q or k can be made again, or where the output is copied: it
        # lies in memory as q does, but on tensors without data it is always contiguous [B, H, T, D]
        netted = part.normed or q.is_contiguous() or device_rules() is not None
        run = attention_forward if netted else partial(unnetted, attention_forward)
        watcher = current.watcher
        with nullcontext() if watcher is None else watcher.within(part.module):
            if part.handed is not None:
                return call(part, module, q, k, value, kwargs, options)
            heads: Tensor = run(module, q, k, value, kwargs.get("attention_mask"), **options)[0]
        return heads


def _biases(tape: Tape, modules: dict[str, nn.Module]) -> tuple[tuple[str, Any], ...]:
    names = {value: name for name, value in tape.inputs.items()}
    attends = [entry for entry in tape.entries if isinstance(entry, Attend) and entry.bias is not None]
    return tuple((names[entry.bias], modules[entry.module]) for entry in attends)  # type: ignore[index]


def _heads(part: Part | Attend | None, later: Part | Attend | None) -> tuple[int, ...]:
    """Which outputs of a program the attention behind it takes; none if q or k comes from a norm: see `normed`."""
    if not isinstance(part, Part) or not isinstance(later, Attend) or later.normed:
        return ()
    return tuple(place for place, value in enumerate(part.outs) if value in later.ins)


def _place(modules: dict[str, nn.Module], name: str) -> tuple[dict[str, Any], str]:
    path, _, leaf = name.rpartition(".")
    return modules[path]._parameters, leaf  # type: ignore[return-value]


def _reader(module: nn.Module, name: str, value: Any) -> Callable[[Any], Any]:
    """How to read a keyword off the attention's module or config; one that is on neither is a constant."""
    for place in (name, f"config.{name}"):
        try:
            if attrgetter(place)(module) == value:
                return attrgetter(place)
        except AttributeError:
            pass
    return Constant(value)


@dataclass(frozen=True)
class Constant:
    """A function that returns one value."""

    value: Any

    def __call__(self, _: Any) -> Any:
        return self.value
