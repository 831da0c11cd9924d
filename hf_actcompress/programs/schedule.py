"""A tape cut at its attentions: programs and the attention calls between them, in order."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..codecs import IDENTITY
from .arithmetic import Add, Cast, Cat, Mul, Neg, Scale, Slice, Split, Unbind
from .broadcast import Shift
from .calls import BATCH, SOURCES, TOKENS
from .dora import AnotherProduct, Magnitude
from .left_out import HEADS, ROWS, TOKENS_FIRST
from .operations import LayerNorm, RMSNorm
from .pointwise import Rope
from .program import Program
from .refusal import NotStraight
from .shapes import Contiguous, Permute, Reshape
from .step import Step
from .tape import Attend, Tape


@dataclass(frozen=True)
class Part:
    """A program in a layer.

    Attributes:
        ins: Its first inputs, which are values of the layer.
        parameters: Its further inputs, which are parameters, by name.
        outs: The layer's values that it returns.
    """

    program: Program
    ins: tuple[int, ...]
    parameters: tuple[str, ...]
    outs: tuple[int, ...]


Schedule = tuple[Part | Attend, ...]

# operations that may read weights that others read, too
_SHARING = (AnotherProduct, Cast, Magnitude, Shift)
# operations whose result, behind a norm, can be made again from what the norm keeps
_POINTWISE = (Rope, Permute, Reshape, Contiguous, Scale, Add, Mul, Neg, Cat, Slice, Split)
# programs of layers that do the same are the same, so that their code is written once
_schedules: dict[Hashable, Schedule] = {}


def schedule_of(tape: Tape) -> Schedule:
    """The parts of a layer. Raises NotStraight if there is nothing in it that a program could do."""
    key = tape.key()
    if key not in _schedules:
        _schedules[key] = tuple(_parts(tape))
    return _schedules[key]


def _parts(tape: Tape) -> Iterator[Part | Attend]:
    runs = list(_runs(tape.entries))
    if not any(isinstance(run, list) for run in runs):
        raise NotStraight("it computes nothing but attention")
    for i, run in enumerate(runs):
        if isinstance(run, Attend):
            yield replace(run, normed=any(is_normed(value, tape.entries) for value in run.ins))
        else:
            yield part_of(tape, run, {tape.result}.union(*(_read(later) for later in runs[i + 1 :])))


def _runs(entries: Iterable[Step | Attend]) -> Iterator[list[Step] | Attend]:
    steps: list[Step] = []
    for entry in entries:
        if isinstance(entry, Step):
            steps.append(entry)
            continue
        if steps:
            yield steps
        steps = []
        yield entry
    if steps:
        yield steps


def is_normed(value: int, entries: list[Step | Attend], exact: bool = False) -> bool:
    """Whether a value is the output of a norm, perhaps rotated, scaled or seen as another view.

    With `exact`, only norms count that keep their input without a codec.
    """
    maker = next((entry for entry in entries if isinstance(entry, Step) and value in entry.outs), None)
    if maker is None or isinstance(maker.operation, (RMSNorm, LayerNorm)):
        return maker is not None and (maker.codec == IDENTITY or not exact)
    return isinstance(maker.operation, _POINTWISE) and any(
        is_normed(x, entries, exact) for x in maker.ins if x is not None
    )


def takes_any_order(tape: Tape) -> bool:
    """Whether stock's code computes the same from an input that is not tokens-first in memory.

    A convolution makes such an input from an image. Sums, and norms that are made of pointwise functions, keep the
    order in memory, and then a product may round in another way. The output of LayerNorm is tokens-first.
    """
    order = {tape.inputs["x"]}
    for entry in tape.entries:
        if not order.intersection(entry.ins):
            continue
        if isinstance(entry, Attend) or not isinstance(entry.operation, (Add, LayerNorm)):
            return False
        if isinstance(entry.operation, Add):
            order.update(entry.outs)
    return True


def _read(run: list[Step] | Attend) -> set[int]:
    if isinstance(run, Attend):
        return set(run.ins)
    return {value for step in run for value in step.ins if value is not None}


def part_of(
    tape: Tape,
    steps: list[Step],
    read_later: set[int],
    shown: frozenset[int] = frozenset(),
    optional: Set[int] = frozenset(),
) -> Part:
    """A program of the steps, with values numbered anew: inputs first.

    Args:
        tape: The tape of the layer.
        steps: Steps of the tape.
        read_later: The values that are read behind these steps.
        shown: Further values that are kept as they are: what attention reads.
        optional: Those of `read_later` that perhaps nobody reads, so that their gradients may be None.
    """
    returned = {value for step in steps for value in step.outs} & read_later
    steps = list(_without_the_rest(tape, steps, returned | shown))
    made = {value for step in steps for value in step.outs}
    names = {value: name for name, value in tape.parameters.items()}
    read = sorted(_read(steps) - made)
    ins = [value for value in read if value not in names]
    weights = [value for value in read if value in names]
    reads = [x for s in steps if not isinstance(s.operation, _SHARING) for x in s.ins]
    if any(reads.count(weight) > 1 for weight in weights):
        raise NotStraight("it reads a weight more than once")
    if not ins:
        raise NotStraight("it computes something out of its weights alone")
    at = {value: i for i, value in enumerate([*ins, *weights])}
    for step in steps:
        for value in step.outs:
            at[value] = len(at)
    renamed = tuple(
        replace(s, ins=tuple(None if x is None else at[x] for x in s.ins), outs=tuple(at[y] for y in s.outs))
        for s in steps
    )
    uses = [value for step in steps for value in step.ins]
    # if several steps read a value here and others read it later, its gradient is one sum in the engine's order
    passed = {value for value in ins if value in read_later and uses.count(value) > 1}
    outs = tuple(sorted(returned | passed))
    metas = tuple(_small(tape.metas[value]) for value in (*ins, *weights))
    places = frozenset(range(len(ins), len(metas)))
    at_will = frozenset(at[value] for value in optional)
    layouts = _layouts(tape, at, frozenset(ins))
    program = Program(renamed, metas, places, tuple(at[value] for value in outs), at_will, layouts, tape.lossless)
    return Part(program, tuple(ins), tuple(names[value] for value in weights), outs)


def _layouts(tape: Tape, at: dict[int, int], ins: frozenset[int]) -> dict[int, str]:
    """For each activation of a program, the layout of its tokens. Inputs of the layer other than x have none."""
    given = {value for name, value in tape.inputs.items() if name != "x"}
    found = {at[x]: _layout(tape.metas[x]) for x in at if x not in given and tape.metas[x].dtype != torch.bool}
    others = {at[x] for x in ins if found.get(at[x]) != TOKENS_FIRST}
    return {value: layout for value, layout in found.items() if layout is not None and value not in others}


def _layout(meta: Tensor) -> str | None:
    sizes = tuple(meta.shape)
    if sizes[:1] == (BATCH * TOKENS,):
        return ROWS
    if sizes[:2] == (BATCH, TOKENS):
        return TOKENS_FIRST
    return HEADS if sizes[:1] + sizes[2:3] == (BATCH, TOKENS) else None


def _without_the_rest(tape: Tape, steps: list[Step], outs: set[int]) -> Iterator[Step]:
    """The steps, with copies of returned parts of a tensor that are not all of it: views would keep the whole."""
    maker = {value: step for step in steps for value in step.outs}
    # the parts of which a view is returned
    parts = {part for value in outs if (part := _part_of(value, maker)) is not None}
    shown: dict[int | None, int] = {}
    for part in parts:
        whole = maker[part].ins[0]
        shown[whole] = shown.get(whole, 0) + tape.metas[part].numel()
    renamed: dict[int | None, int] = {}
    for step in steps:
        yield replace(step, ins=tuple(renamed.get(x, x) for x in step.ins))
        for value in parts.intersection(step.outs):
            whole = step.ins[0]
            assert whole is not None
            if shown[whole] < tape.metas[whole].numel():
                renamed[value] = len(tape.metas)
                tape.metas.append(tape.metas[value])
                yield Step(Contiguous(), (value,), (renamed[value],))


def _part_of(value: int, maker: dict[int, Step]) -> int | None:
    """The part of a tensor (a slice, or one of a split) of which a value is a view; None if there is none."""
    step = maker.get(value)
    if step is None or isinstance(step.operation, (Slice, Split, Unbind)):
        return None if step is None else value
    source = step.ins[0] if isinstance(step.operation, (Permute, Reshape)) else None
    return None if source is None else _part_of(source, maker)


def _small(meta: Tensor) -> Tensor:
    """The same with few tokens: writing code runs it on tensors without data, and would compute large ones in tiles."""
    few = {BATCH: 2, TOKENS: 3, SOURCES: 5, BATCH * TOKENS: 6}
    return torch.empty([few.get(size, size) for size in meta.shape], dtype=meta.dtype, device="meta")
