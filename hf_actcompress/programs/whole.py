"""A layer as one program, its attention included, for the calls whose attention torch runs by a fused kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.region import region_in_progress
from ..reference.dense_attention import fused_kernel, sdpa_settings, shared_bias
from ..reference.device_rules import device_rules
from .attention import Attention
from .calls import BATCH, TOKENS
from .own_attention import OwnAttention
from .refusal import NotStraight
from .rows import on_rows
from .schedule import Part, is_normed, part_of
from .shapes import Permute
from .step import Step
from .tape import Attend, Tape

# keywords of an attention that `Attention` takes over, or that torch's kernels do not need
_KEYWORDS = {"dropout", "scaling", "is_causal", "sliding_window"}
# stands in place of a kernel's name for attention that runs again in backward
OWN = "own"


@dataclass(frozen=True)
class Whole:
    """The one program of a layer.

    Attributes:
        part: The program that returns the layer's result.
        cached: The program that also returns keys and values, for a cache.
        outputs: The places of the result, and of the keys and the values of each attention, in the outputs of `cached`.
        masks: By the name of the layer's argument: the value that is this mask.
        own: Whether its attention runs again in backward (`OwnAttention`), whatever function computes it.
        heads: The number of heads of q, and of k and v; the width of a head of q and k, and of v.
        dtype: The dtype of v.
        dropout: The rate at which probabilities are dropped.
        causal: Whether the upper triangle is masked where there is no mask.
    """

    part: Part
    cached: Part
    outputs: tuple[int, ...]
    masks: dict[str, int]
    own: bool
    heads: tuple[int, int, int, int]
    dtype: torch.dtype
    dropout: float
    causal: bool

    def kernel(self, x: Tensor, masks: Sequence[Any], autocast: torch.dtype | None) -> str | None:
        """The kernel for a call with that input and these masks; None: it goes through the attention function."""
        for mask in masks:
            if mask is not None and (type(mask) is not type(x) or mask.requires_grad):
                return None
        # a checkpointed layer that keeps the results of its attention gets them from the attention function
        if region_in_progress() is not None:
            return None
        if self.own:
            return OWN
        rules = device_rules()
        if rules is not None and not rules.on_cpu:
            return None
        (mask,) = masks
        given = None if mask is None else (mask.shape, mask.dtype)
        rows = x.size(0), x.size(1)
        causal = self.causal and mask is None
        return fused_kernel(
            x.device, autocast or self.dtype, rows, self.heads, given, self.dropout, causal, sdpa_settings()
        )

    def given_masks(self, masks: Sequence[Any], kernel: str, autocast: torch.dtype | None) -> dict[int, Any]:
        """Each mask by its value, as the kernel takes it."""
        if kernel == "efficient":
            # made for the first layer of a model, and kept once
            masks = [None if mask is None else shared_bias(mask, autocast or self.dtype) for mask in masks]
        return dict(zip(self.masks.values(), masks, strict=True))


_wholes: dict[Hashable, Whole | None] = {}


def whole_of(tape: Tape) -> Whole | None:
    """The one program of a layer. None unless it has one attention that a kernel could run, or only attentions that run
    again in backward.
    """
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
    own = bool(attends) and all(attend.own is not None for attend in attends)
    if len(attends) != 1 and not own:
        return None
    if tape.calls_another:
        return None
    options = dict(attends[0].keywords)
    if not own and any(value is not False for name, value in options.items() if name not in _KEYWORDS):
        return None
    tape = replace(tape, metas=[*tape.metas])
    masks: dict[str, int] = {}
    for attend in attends:
        masks.setdefault(attend.mask, len(tape.metas))
        tape.metas.append(torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta"))
    steps, result = on_rows(tape, _steps(tape, masks), tape.result)
    through_cache = [
        replace(step, operation=replace(step.operation, cached=True))
        if isinstance(step.operation, OwnAttention)
        else step
        for step in steps
    ]
    made = partial(part_of, tape, shown=frozenset(x for attend in attends for x in attend.ins))
    kept = [value for attend in attends for value in attend.ins[1:]]
    cached = made(through_cache, {result, *kept}, optional={*kept} - {result})
    outputs = tuple(cached.outs.index(value) for value in (result, *kept))
    attend = attends[0]
    q, k, v = (tape.metas[value] for value in attend.ins)
    return Whole(
        made(steps, {result}), cached, outputs, masks, own,
        (q.size(1), k.size(1), q.size(-1), v.size(-1)), v.dtype, options.get("dropout") or 0.0, attend.causal,
    )  # fmt: skip


def _steps(tape: Tape, masks: dict[str, int]) -> list[Step]:
    """The layer's steps, with the attention as one of them."""
    steps: list[Step] = []
    for entry in tape.entries:
        if isinstance(entry, Step):
            steps.append(entry)
            continue
        mask = masks[entry.mask]
        if entry.own is not None:
            state = len(tape.metas)
            tape.metas.append(torch.empty(0, device="meta"))
            ins = *entry.ins, mask, entry.bias
            steps.append(Step(OwnAttention(entry.own), ins, (entry.out, state), entry.module, entry.codec))
            continue
        options = dict(entry.keywords)
        derived = tuple(is_normed(value, tape.entries, exact=True) for value in entry.ins)
        rates: Any = options.get("dropout") or 0.0, entry.causal, options.get("scaling")
        operation = Attention(derived, *rates)
        heads = tape.metas[entry.out]
        outs = tuple(range(len(tape.metas), len(tape.metas) + 4))
        out = heads.transpose(1, 2)
        tape.metas += [out, out.new_empty(out.shape[:3]), *(torch.empty(0, device="meta") for _ in range(2))]
        steps.append(Step(operation, (*entry.ins, mask), outs, entry.module, entry.codec))
        steps.append(Step(Permute((0, 2, 1, 3)), outs[:1], (entry.out,), entry.module))
    return steps
