"""Modules with hooks of the user, which may write where no version counter sees it: ``output.data[...] = 0``.

Stock differentiates what is in a tensor when backward reads it. So what a hook has been handed must not be recomputed
from what it was made of before the hook. Such modules get two more hooks behind those of the user, by which the
registry forgets the tensors that the user's hooks were handed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import nn

from ..compiling import is_compiling
from ..private_apis import hooks_on_every_module
from ..records import forget, tensors_in
from .base import HOOKS

# the hooks of these packages read activations, or return others, and write on none
_READERS = frozenset({"accelerate", "deepspeed", "hf_actcompress", "peft", "torch", "transformers", "trl"})
# the hooks of one module: those for its output, and those for its input
_Hooks = tuple[nn.Module, dict[int, Any], dict[int, Any]]


def hooks_of(modules: Iterable[nn.Module]) -> list[_Hooks]:
    """Where these modules keep the hooks of their forwards."""
    return [(module, vars(module)[HOOKS[0]], vars(module)[HOOKS[1]]) for module in modules]


def watch(hooked: list[_Hooks]) -> bool:
    """Let the registry forget what hooks of the user are handed in the forward that begins. Whether there are any."""
    everywhere = hooks_on_every_module()
    # most models have no hooks: this runs in each forward
    if not everywhere and not any([after or before for _, after, before in hooked]):
        return False
    found = False
    for module, after, before in hooked:
        wanted = everywhere or any(map(_may_write, (*after.values(), *before.values())))
        found = found or wanted
        for hooks, own in ((after, _forget_output), (before, _forget_input)):
            last = next(reversed(hooks.values()), None)
            if last is own if wanted else own not in hooks.values():
                continue
            _take_off(hooks, own)
            if wanted and own is _forget_output:
                module.register_forward_hook(_forget_output)
            elif wanted:
                module.register_forward_pre_hook(_forget_input, with_kwargs=True)
    return found


def take_off_hooks(module: nn.Module) -> None:
    """Remove the hooks that `watch` has put on a module."""
    for hooks, own in zip(HOOKS, (_forget_output, _forget_input), strict=False):
        _take_off(vars(module)[hooks], own)


def _take_off(hooks: dict[int, Any], own: Any) -> None:
    for number in [number for number, hook in hooks.items() if hook is own]:
        del hooks[number]


def _may_write(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    package = str(getattr(hook, "__module__", None) or type(hook).__module__).partition(".")[0]
    return package not in _READERS


def _forget_output(module: nn.Module, args: Any, output: Any) -> None:
    _forget(output)


def _forget_input(module: nn.Module, args: Any, kwargs: Any) -> None:
    _forget((args, kwargs))


def _forget(given: Any) -> None:
    if not is_compiling():
        for x in tensors_in(given):
            forget(x)
