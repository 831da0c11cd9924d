"""Each saved-tensor hook of this package notes which hooks were on before it, so that the registry can ignore ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..private_apis import innermost_saved_tensor_hooks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_OUTSIDE = "actcompress_outside"


def hooks_outside() -> Hooks | None:
    """The innermost saved-tensor hooks that are not this package's, as (pack, unpack); None if there are none."""
    hooks: Hooks | None = innermost_saved_tensor_hooks()
    while hooks is not None:
        owner = getattr(hooks[0], "__self__", hooks[0])
        if not hasattr(owner, _OUTSIDE):
            break
        hooks = getattr(owner, _OUTSIDE)
    return hooks


def stands_before(hook: object, outside: Hooks | None) -> None:
    """Note which hooks were active before one of our own, `hook`: a pack hook, or the object whose method it is."""
    setattr(hook, _OUTSIDE, outside)
