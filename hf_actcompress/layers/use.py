"""How one layer runs a plan that it shares with others: with its own codecs, caches and attention modules."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..codecs import IDENTITY
from ..graphs.compiled import Compiled, compiled
from ..graphs.plan import LayerPlan
from ..modules.base import settings_of
from ..modules.checkpoint import KeptInput
from .caches import Slot
from .function import Way
from .noted import ARGUMENT
from .store import Known


class Use(NamedTuple):
    """How one layer runs a plan. It holds as long as the look holds.

    Attributes:
        way: How it keeps what the plan keeps.
        slots: Where it puts keys and values in caches.
        modules: The modules that are called of which no tracer sees the inside.
    """

    way: Way
    slots: list[Slot]
    modules: list[nn.Module]


def use_of(layer: nn.Module, known: Known, plan: LayerPlan, keeps: KeptInput | None, real: bool) -> Use:
    """How a layer runs a plan, with data (`real`) or with tensors without data."""
    slots = [slot._replace(index=_index(layer, slot.index)) for slot in known.slots]
    modules = [layer.get_submodule(call.path) for call in known.calls]
    return Use(_way(layer, plan, keeps, real), slots, modules)


def _index(layer: nn.Module, place: Any) -> Any:
    if isinstance(place, int) or place[0] == ARGUMENT:
        return place
    return getattr(layer.get_submodule(place[0]), place[1])


def _way(layer: nn.Module, plan: LayerPlan, keeps: KeptInput | None, real: bool) -> Way:
    """How a layer runs a plan, and keeps what it keeps."""
    codecs = {x.place: x.codec_in(layer) for x in plan.packed}
    if keeps is not None and plan.outside:
        codecs[plan.outside[0].place] = keeps.codec
    outside = [x._replace(codec=codecs.get(x.place, IDENTITY)) for x in plan.outside]
    if real and settings_of(layer).compile:  # type: ignore[union-attr]
        code = compiled(plan, {x.place: codecs[x.place] for x in plan.packed if not x.outside})
        if isinstance(code, Compiled):
            packs = [x.packer(codecs[x.place]) for x in code.apart]
            return Way(code.forward, code.backward, (packs,) if packs else (), outside, compiled=True)
    packs = [x.packer(codecs[x.place]) for x in plan.packed if not x.outside]
    return Way(plan.forward, plan.backward, (packs,) if packs else (), outside)
