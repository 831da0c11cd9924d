"""How a program runs in one setting: code for both directions, and what is kept between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ..codecs import IDENTITY
from ..private_apis import without_dispatch_modes
from ..records import declare_in_order
from .backward import Backward
from .computation import Computation
from .emit import CallSetting, Emitter
from .keeping import Outside, source_of
from .left_out import LeftOut
from .shapes import Reshape


@dataclass(frozen=True)
class Rebuilt:
    """An output of a program that nobody keeps: an op behind the program that needs it in backward recomputes it.

    Attributes:
        output: The position of the output among the program's outputs.
        code: Computes the output. It takes a list of the sources, in reverse order, and returns a tuple with the output
            alone, which may have the shape of rows [B * T, C].
        sources: For each source its position in the list of the program's inputs and the values that its forward
            returns.
        kept: For each source its position among the tensors that the program keeps, if it is a tensor that the program
            made or a weight; None for an activation from outside.
        fewer: For each source whether only some of its rows are kept (`left_out`).
    """

    output: int
    code: Callable[..., tuple[Any, ...]]
    sources: tuple[int, ...]
    kept: tuple[int | None, ...]
    fewer: tuple[bool, ...]

    def declare(
        self, y: Tensor, pool: Sequence[Any], kept: Sequence[Any], sharded: bool, left_out: LeftOut | None
    ) -> None:
        """Declare that y is rebuilt from its sources, so that ops that read y need not keep it.

        Heads may lie in memory as [B, T, H, D] and be seen as [B, H, T, D].

        Args:
            y: The output.
            pool: The inputs, and what the forward returned.
            kept: What is kept, in the order of the plan.
            sharded: Whether the weights' memory is freed when the layer has run.
            left_out: The rows that are left out; None if all are kept.
        """
        sources = [
            left_out.record(pool[i], y.device)
            if fewer and left_out is not None
            else source_of(pool[i], sharded, own=False)
            if at is None or sharded
            else source_of(kept[at], sharded, own=True)
            for i, at, fewer in zip(self.sources, self.kept, self.fewer, strict=True)
        ]
        swapped = y.dim() == 4 and not y.is_contiguous()
        order = y.transpose(1, 2) if swapped else y
        declare_in_order(y, order, partial(self._again, swapped, order.shape), *sources)

    def _again(self, swapped: bool, shape: torch.Size, *sources: Tensor) -> Tensor:
        (y,) = self.code(list(reversed(sources)))
        return y.transpose(1, 2).contiguous() if swapped else y.view(shape)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ProgramPlan:
    """How a program runs in one setting.

    Attributes:
        forward: Takes the inputs and returns the outputs, then other values that are kept, in one tuple.
        backward: Takes one list, which it empties from its end: what is kept, then the gradients of the outputs that
            want one, both in reverse order. Returns the gradients of the inputs. A backward that stops is a generator,
            which `Stages` drives.
        outputs: How many outputs there are.
        graded: Which of them want a gradient.
        kept: For each kept tensor its position in the list of the inputs and the values that the forward returns.
        keepers: The module for which each is kept, for reports.
        weights: Which of the kept tensors are weights.
        outside: Which of the kept tensors are activations from outside.
        packs: Whether kept values from inside the program are packed: through a codec, or to some of their rows.
        rebuilt: The outputs that other ops recompute instead of keeping them.
        optional: Which of the outputs may have no gradient while the code runs; the others then get zeros.
        reached: For each output that wants a gradient: the inputs on which it depends.
        layouts: For each output that wants a gradient, which dimensions hold its tokens: a layout of `left_out`.
        differentiates: Whether the code itself runs autograd. All other code runs below autograd, which costs less.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]
    outputs: int
    graded: tuple[int, ...]
    kept: tuple[int, ...]
    keepers: tuple[str, ...]
    weights: tuple[bool, ...]
    outside: tuple[Outside, ...]
    packs: bool
    rebuilt: tuple[Rebuilt, ...]
    optional: frozenset[int]
    reached: tuple[frozenset[int], ...]
    layouts: tuple[str | None, ...]
    differentiates: bool


def make_plan(program: Computation, setting: CallSetting) -> ProgramPlan:
    """Write the code of both directions."""
    with writing(setting):
        return assembled(program, *both_ways(program, setting))


@contextmanager
def writing(setting: CallSetting) -> Iterator[None]:
    """The context in which code is written down: everything that runs in it runs on tensors without data."""
    with without_dispatch_modes(), torch.no_grad(), torch.autocast(setting.device.type, enabled=False):
        yield


def both_ways(program: Computation, setting: CallSetting) -> tuple[Emitter, Backward]:
    """The graphs of both directions.

    Which sums need not be kept is known once everything else that is kept is known. So the graphs are written again if
    there are such sums.
    """
    forward, backward = _both_ways(program, setting, frozenset())
    sums = _sums_of_kept(program, forward, backward)
    return _both_ways(program, setting, sums) if sums else (forward, backward)


def _sums_of_kept(program: Computation, forward: Emitter, backward: Backward) -> frozenset[int]:
    """The kept sums that can be recomputed from other kept values, such as x + norm(y) where x and y are kept."""
    if not program.lossless:
        # a codec changes the terms, so their sum would not be the one of the forward
        return frozenset()
    found: set[int] = set()
    sums = {step.y for step in program.steps if step.operation.sums}
    for value in sorted(sums.intersection(map(backward.wide, backward.kept))):
        again = Backward(forward, program, backward.wanted, sums=frozenset({value}))
        again.take_sizes_of(again.popped(forward.meta(forward.values[0])))
        again.want(value)
        if program.weights.union(backward.kept).difference(found).issuperset(again.kept):
            found.add(value)
    return frozenset(found)


def _both_ways(program: Computation, setting: CallSetting, sums: frozenset[int]) -> tuple[Emitter, Backward]:
    """The graphs if these sums are made again in backward."""
    forward = forward_of(program, setting)
    wanted = _wanted(program, setting.needed)
    backward = Backward(forward, program, wanted, len(program.metas), sums)
    for value in program.outputs:
        if value in wanted:
            backward.give(value, backward.popped(forward.meta(forward.values[value])))
            if backward.shape_of(value)[:2] == forward.meta(forward.values[0]).shape[:2]:
                backward.take_sizes_of(backward.gradients[value])
            if value in program.optional:
                backward.optional.add(backward.gradients[value])
    stops = [*reversed(setting.stops)]
    for i, step in reversed([*enumerate(program.steps)]):
        if any(value in backward.gradients for value in step.outs):
            backward.module = step.module
            step.operation.backward(backward, step)
        while stops and all(program.first_readers[weight] >= i for weight in stops[-1]):
            backward.stop(stops.pop())
    return forward, backward


def forward_of(program: Computation, setting: CallSetting, repeated: bool = False) -> Emitter:
    """The graph of the forward, or of its second run, which is a part of a backward."""
    forward = Emitter(setting)
    for i, (meta, dtype) in enumerate(zip(program.metas, setting.dtypes, strict=True)):
        node = forward.given(f"v{i}", None if dtype is None else torch.empty(meta.shape, dtype=dtype, device="meta"))  # type: ignore[union-attr]
        if dtype is not None:
            forward.values[i] = node
    if setting.fewer:
        forward.picks = forward.given("picks", None)
    forward.take_sizes_of(forward.values[0])
    for step in program.steps:
        ins = [None if x is None else forward.values.get(x) for x in step.ins]
        run = step.operation.repeat if repeated else step.operation.forward
        nodes = run(forward, *ins)
        forward.values.update(zip(step.outs, nodes if isinstance(nodes, tuple) else (nodes,), strict=True))
    return forward


def _wanted(program: Computation, needed: tuple[bool, ...]) -> frozenset[int]:
    wanted = {i for i, x in enumerate(needed) if x}
    for step in program.steps:
        if wanted.intersection(step.ins):
            wanted.update(step.outs)
    return frozenset(wanted)


def _outside(program: Computation, backward: Backward, place: int, value: int) -> Outside:
    """How an activation from outside is kept. Heads are kept in the shape in which a linear layer reads them."""
    codec, fewer = backward.codec_of(value), backward.setting.fewer and value in program.layouts
    if codec == IDENTITY:
        for step in program.steps:
            if isinstance(step.operation, Reshape) and step.operation.flattens and step.ins == (value,):
                return Outside(place, backward.codec_of(step.y), True, fewer)
    return Outside(place, codec, fewer=fewer)


def _made_again(program: Computation, forward: Emitter, backward: Backward) -> dict[int, tuple[Backward, Node]]:
    """For each output that can be recomputed from values that are kept anyway, by place: the graph and its result."""
    again = {}
    # for each value [B, T, C] that is a view of rows, the value of the rows
    rows = {s.y: s.x for s in program.steps if isinstance(s.operation, Reshape) and s.operation.makes_tokens}
    for i, value in enumerate(program.outputs):
        if value in program.optional:
            continue
        made = Backward(forward, program, backward.wanted)
        node = made.want(rows.get(value, value))
        if value >= len(program.metas) and all(x in backward.kept or x in program.weights for x in made.kept):
            again[i] = made, node
    return again


def _rebuilt(
    program: Computation, backward: Backward, output: int, sources: tuple[int, ...], made: Backward, node: Node
) -> Rebuilt:
    kept = tuple(map(backward.place_of_own, made.kept))
    fewer = tuple(x >= len(program.metas) and x in program.layouts for x in made.kept)
    return Rebuilt(output, made.code([node]), sources, kept, fewer)


def assembled(program: Computation, forward: Emitter, backward: Backward) -> ProgramPlan:
    """The plan that both graphs make."""
    inputs = len(program.metas)
    again = _made_again(program, forward, backward)
    results = [forward.values[value] for value in program.outputs]
    at: dict[int, int] = {}
    for value in backward.kept:
        node = backward.packed.get(value, forward.values[value])
        if value >= inputs and node not in results:
            results.append(node)
        at[value] = value if value < inputs else inputs + results.index(node)

    def places(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(at.get(value, value) for value in values)

    given = [
        _outside(program, backward, i, x)
        for i, x in enumerate(backward.kept)
        if x < inputs and x not in program.weights
    ]
    wanted = [value for value in program.outputs if value in backward.wanted]
    return ProgramPlan(
        forward.code(results),
        backward.code([*map(backward.gradients.get, range(inputs))]),
        len(program.outputs),
        tuple(i for i, value in enumerate(program.outputs) if value in backward.wanted),
        places(backward.kept),
        tuple(backward.readers[value] for value in backward.kept),
        tuple(value in program.weights for value in backward.kept),
        tuple(given),
        bool(backward.packed),
        tuple(_rebuilt(program, backward, i, places(made.kept), made, node) for i, (made, node) in again.items()),
        frozenset(i for i, value in enumerate(program.outputs) if value in program.optional),
        tuple(map(program.inputs_of, wanted)),
        tuple(map(program.layouts.get, wanted)),
        any(step.operation.differentiates for step in program.steps),
    )
