"""A layer as one program, its attention included, for the calls whose attention torch runs by a fused kernel."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..codecs import IDENTITY
from ..ops.region import region_in_progress
from ..reference.dense_attention import fused_kernel, sdpa_settings
from ..reference.device_rules import device_rules
from .arithmetic import Permute
from .attention import Attention
from .calls import BATCH, TOKENS
from .refusal import NotStraight
from .schedule import Part, is_normed, part_of
from .step import Step
from .tape import Attend, Tape

# keywords of an attention that are its own, or that the kernels of one go without
_KEYWORDS = {"dropout", "scaling", "is_causal", "sliding_window"}


@dataclass(frozen=True)
class Whole:
    """The one program of a layer.

    Attributes:
        part: Returns the layer's result.
        cached: Returns keys and values beside it, for a cache.
        outputs: Where among its outputs are the result, the keys and the values.
        mask: The value that is the mask.
        heads: Of q, of k and v; the width of those of q and k, and of v.
        dtype: Of v.
        dropout: Of probabilities.
        causal: Whether the upper triangle is masked where there is no mask.
    """

    part: Part
    cached: Part
    outputs: tuple[int, int, int]
    mask: int
    heads: tuple[int, int, int, int]
    dtype: torch.dtype
    dropout: float
    causal: bool

    def kernel(self, x: Tensor, mask: Any, autocast: torch.dtype | None) -> str | None:
        """The kernel for a call with that input and mask; None: it goes through the attention function."""
        given = None
        if mask is not None:
            if type(mask) is not type(x) or mask.requires_grad:
                return None
            given = mask.shape, mask.dtype
        rules = device_rules()
        # a checkpointed layer that keeps its attention asks the attention function for it
        if (rules is not None and not rules.on_cpu) or region_in_progress() is not None:
            return None
        rows = x.size(0), x.size(1)
        causal = self.causal and mask is None
        return fused_kernel(
            x.device, autocast or self.dtype, rows, self.heads, given, self.dropout, causal, sdpa_settings()
        )


_wholes: dict[Hashable, Whole | None] = {}


def whole_of(tape: Tape) -> Whole | None:
    """The program of a layer; None if it has not one attention that a kernel could run."""
    if not tape.whole:
        return None
    key = tape.key()
    if key not in _wholes:
        try:
            _wholes[key] = _whole(tape)
        except NotStraight:
            _wholes[key] = None
    return _wholes[key]


def _whole(tape: Tape) -> Whole | None:
    attends = [entry for entry in tape.entries if isinstance(entry, Attend)]
    if len(attends) != 1:
        return None
    (attend,) = attends
    options = dict(attend.keywords)
    if any(value is not False for name, value in options.items() if name not in _KEYWORDS):
        return None
    tape = replace(tape, metas=[*tape.metas])
    mask = len(tape.metas)
    tape.metas.append(torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"))
    steps = _steps(tape, attend, mask)
    _, keys, values = attend.ins
    made = partial(part_of, tape, steps, shown=frozenset(attend.ins))
    cached = made({tape.result, keys, values}, optional={keys, values} - {tape.result})
    outputs = tuple(cached.outs.index(value) for value in (tape.result, keys, values))
    q, k, v = (tape.metas[value] for value in attend.ins)
    return Whole(
        made({tape.result}), cached, outputs, mask,  # type: ignore[arg-type]
        (q.size(1), k.size(1), q.size(-1), v.size(-1)), v.dtype, options.get("dropout") or 0.0, attend.causal,
    )  # fmt: skip


def _steps(tape: Tape, attend: Attend, mask: int) -> list[Step]:
    """The layer's steps, with the attention as one of them."""
    steps: list[Step] = []
    for entry in tape.entries:
        if isinstance(entry, Step):
            steps.append(entry)
            continue
        options = dict(entry.keywords)
        derived = tuple(is_normed(value, tape.entries, exact=True) for value in entry.ins)
        operation = Attention(
            entry.codec != IDENTITY, derived, options.get("dropout") or 0.0, entry.causal, options.get("scaling")
        )  # type: ignore[arg-type]
        heads = tape.metas[entry.out]
        outs = tuple(range(len(tape.metas), len(tape.metas) + 4))
        tape.metas += [heads.transpose(1, 2), *(torch.empty(0, device="meta") for _ in range(3))]
        steps.append(Step(operation, (*entry.ins, mask), outs, entry.module, entry.codec))
        steps.append(Step(Permute((0, 2, 1, 3)), outs[:1], (entry.out,), entry.module))
    return steps
