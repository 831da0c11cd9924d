"""A layer's steps on rows [B * T, C] in place of tokens [B, T, C]: the same kernels on the same memory, and no views.

On [B, T, C] each product of a backward needs a view of its gradient as rows, and another one back. A view costs the
host as much as a small kernel. So everything that works row by row gets rows: the layer's input is seen as rows once,
heads [B, T, H, D] are views of rows, and the layer's result is seen as tokens once.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .arithmetic import Split
from .calls import BATCH, TOKENS
from .shapes import Reshape
from .step import Operation, Step
from .tape import Tape


def on_rows(tape: Tape, steps: list[Step], result: int) -> tuple[list[Step], int]:
    """The steps on rows where that is possible, and the value of the result, as tokens.

    The shapes of the tape's values become those of rows.
    """
    x = tape.inputs["x"]
    flat = _flat_values(tape, steps, x)
    if x not in flat or result not in flat:
        return steps, result
    rows_of_x, tokens = len(tape.metas), len(tape.metas) + 1
    width, out_width = tape.metas[x].size(-1), tape.metas[result].size(-1)
    tape.metas += [_rows(tape.metas[x]), _rows(tape.metas[result]).view(BATCH, TOKENS, out_width)]
    found: list[Step] = []
    for step in steps:
        if x in step.ins and not any(rows_of_x in earlier.outs for earlier in found):
            found.append(Step(Reshape((-1, width), (-2, -3, width)), (x,), (rows_of_x,), step.module))
        ins = tuple(rows_of_x if value == x else value for value in step.ins)
        found.append(replace(step, operation=_on_rows(step, flat), ins=ins))
    for value in flat - {x}:
        tape.metas[value] = _rows(tape.metas[value])
    found.append(Step(Reshape((-2, -3, out_width), (-1, out_width)), (result,), (tokens,), steps[-1].module))
    return found, tokens


def _flat_values(tape: Tape, steps: list[Step], x: int) -> set[int]:
    """The values that may be rows: the steps that make or read one work row by row, or are views as heads."""
    made = [value for step in steps for value in step.outs]
    flat = {value for value in (x, *made) if _is_tokens(tape.metas[value])}
    while True:
        others = [step for step in steps if not _works(tape, step, flat)]
        left = flat.difference(*(step.ins for step in others), *(step.outs for step in others))
        if left == flat:
            return flat
        flat = left


def _works(tape: Tape, step: Step, flat: set[int]) -> bool:
    """Whether the step works row by row on values that may be rows; or makes heads from rows, or the reverse."""
    operation = step.operation
    if isinstance(operation, Reshape):
        (source,), (made,) = step.ins, step.outs
        return (source in flat) != (made in flat) and _is_of_heads(operation)
    if not operation.works_by_rows:
        return False
    activations = set(step.ins) - {None, *tape.parameters.values()}
    return step.y in flat and activations <= flat


def _is_of_heads(operation: Reshape) -> bool:
    """Whether it makes [B, T, H, D] from [B, T, H * D], or the reverse."""
    sizes = operation.sizes, operation.back
    return all(both[:2] == (-2, -3) for both in sizes) and sorted(map(len, sizes)) == [3, 4]


def _on_rows(step: Step, flat: set[int]) -> Operation:
    """The step's operation, with the sizes and dimensions of rows."""
    operation = step.operation
    if isinstance(operation, Split) and step.y in flat:
        return replace(operation, dim=-1)
    if isinstance(operation, Reshape) and flat.intersection((*step.ins, *step.outs)):
        return replace(operation, sizes=_as_rows(operation.sizes), back=_as_rows(operation.back))
    return operation


def _as_rows(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (-1, *sizes[2:]) if len(sizes) == 3 else sizes


def _is_tokens(meta: Tensor) -> bool:
    """Whether a value has the shape of tokens, or that of rows, which the code of some layers (OPT's) makes itself."""
    return tuple(meta.shape[:-1]) in ((BATCH, TOKENS), (BATCH * TOKENS,))


def _rows(meta: Tensor) -> Tensor:
    return meta.flatten(0, 1) if meta.dim() == 3 else meta
