"""Prints the plans of a layer: what crosses from forward to backward, and the code of both."""

from __future__ import annotations

from torch import nn

from ..graphs.plan import LayerPlan
from ..modules.base import settings_of
from .site import LayerSettings


def show(layer: nn.Module) -> str:
    """The plans of a layer's calls so far, as text.

    Args:
        layer: A patched layer that runs by plans; its name is in ``patch_report(model)``.

    Raises:
        TypeError: It is another module.
    """
    settings = settings_of(layer)
    if not isinstance(settings, LayerSettings):
        raise TypeError(f"show takes a layer that runs by plans, and got a {type(layer).__name__} that does not")
    plans = [known.plan for known in settings.plans.known()]
    texts = [_text(plan) if isinstance(plan, LayerPlan) else f"module by module: {plan}" for plan in plans]
    return "\n\n".join(texts) or "no call with gradients so far"


def _text(plan: LayerPlan) -> str:
    inputs = plan.halves.inputs
    rows = ["what crosses from forward to backward:"]
    for x, module, (_, is_weight) in zip(plan.halves.kept, plan.keepers, plan.kept, strict=True):
        value, what = x.meta["val"], "weight" if is_weight else "input" if x in inputs else "made"
        dtype, shape = str(value.dtype).removeprefix("torch."), ", ".join(map(str, value.shape))
        rows.append(f"  {x.name:<28} {what:<7} {dtype:<10} [{shape}]  for {module or 'the layer'}")
    return "\n".join([*rows, plan.halves.forward.code.rstrip(), plan.halves.backward.code.rstrip()])
