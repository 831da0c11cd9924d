"""Weights that an adapter of PEFT makes for one call, as LoRA does for `target_parameters`: they are not kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..private_apis.parametrizations import registered_without_writing
from ..records import AdaptedWeight, declare, parameter, stored_exact


def adapts_a_weight(adapter: nn.Module) -> bool:
    """Whether a layer of PEFT adapts one parameter of its base layer, whose own code runs with the adapted one."""
    return isinstance(getattr(adapter, "parameter_name", None), str)


@contextmanager
def weights_declared(base: Any) -> Iterator[None]:
    """While the block runs, each call of `base` declares the weights that adapters have made for it as derived.

    Of nested adapters the innermost one sees the weights of all. Without a gradient, too, a call must not look as if it
    had written into the parameters, which an earlier call keeps.
    """
    if adapts_a_weight(base):
        yield
        return
    hook = base.register_forward_pre_hook(_declare_all)
    try:
        yield
    finally:
        hook.remove()


def _declare_all(module: nn.Module, _: Any) -> None:
    parametrizations = module._modules.get("parametrizations")
    for name, made in () if parametrizations is None else parametrizations.named_children():
        if len(made) == 1:  # type: ignore[arg-type]
            _declare(getattr(module, name), made)


def _declare(weight: Tensor, made: Any) -> None:
    """Declare a weight [any shape] as made of the parameter and of the tensors that its adapter holds."""
    adapter = made[0]
    own = {name: value.detach() for name, value in vars(adapter).items() if isinstance(value, Tensor)}
    # some adapters hold an update as large as the weight itself: to keep that would save nothing
    small = sum(value.nbytes for value in own.values()) < weight.nbytes
    if type(adapter).__module__.startswith("peft.") and small and next(adapter.parameters(), None) is None:
        # without tensors, because only those in `save_for_backward` are seen by checkpointing and offloading
        bare = copy.copy(adapter)
        bare.__dict__.update(dict.fromkeys(own))
        registered_without_writing(made)
        recomputed = AdaptedWeight(partial(_adapted, bare, tuple(own)))
        declare(weight, recomputed, parameter(made.original), *map(stored_exact, own.values()))


def _adapted(bare: nn.Module, names: tuple[str, ...], weight: Tensor, *values: Tensor) -> Tensor:
    """A weight to which an adapter adds its part; `values` are the tensors of the adapter."""
    adapter = copy.copy(bare)
    adapter.__dict__.update(zip(names, values, strict=True))
    y: Tensor = adapter(weight)
    return y
