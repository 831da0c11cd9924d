"""What a patched module becomes: a subclass of its own type that adds one mixin.

The class is made on first use, once per (mixin, type). Instances deep-copy and pickle by (mixin, type), so a file
written by `torch.save` needs this package and the stock class, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..codecs import IDENTITY, Codec
from ..errors import UnsupportedModelError


@dataclass(frozen=True)
class Settings:
    """What a patched module was told: its role, the op's variant and constants, what it keeps and through which codec.

    `note` says why it keeps something else than was asked for. `config` is the module's own where the mixin shadows it.
    """

    role: str
    variant: str = ""
    options: tuple[Any, ...] = ()
    codec: Codec = IDENTITY
    keeps: str = "input"
    note: str = ""
    config: Any = field(default=None, compare=False, repr=False)


class PatchedModule:
    """Base of the mixins. `stock_class` is the type before patching, and what unpatching restores."""

    stock_class: ClassVar[type[nn.Module]]
    # of the name of the class, as it shows in `repr(model)`
    prefix: ClassVar[str] = "ActCompress"
    actcompress: Settings

    def __reduce_ex__(self, protocol: Any) -> Any:
        stock: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return (_new, (type(self).__bases__[0], self.stock_class), *stock[2:])

    def stock_forward(self) -> Callable[..., Any]:
        """The stock forward, bound. No method: torch 2.11 can neither trace its binding nor hand it to a Function."""
        return partial(self.stock_class.forward, self)

    def _replicate_for_data_parallel(self) -> Any:
        # its replicas would share the forward of the original, on the original's device
        raise UnsupportedModelError(
            "nn.DataParallel cannot replicate a patched model; start one process per GPU (torchrun, accelerate launch) "
            "for DDP, or show one GPU to the process (CUDA_VISIBLE_DEVICES=0)"
        )


def _new(mixin: type, stock_class: Any) -> nn.Module:
    cls = patched_class(mixin, stock_class)
    module: nn.Module = cls.__new__(cls)
    return module


@cache
def patched_class(mixin: Any, stock_class: Any) -> type[nn.Module]:
    """The subclass of `stock_class` with `mixin`."""
    name = f"{mixin.prefix}{stock_class.__name__}"
    return type(name, (mixin, stock_class), {"stock_class": stock_class, "__module__": mixin.__module__})


def patch_instance(module: nn.Module, mixin: type, settings: Settings) -> None:
    """Swap the module's class in place. Parameters, buffers, hooks and keys stay."""
    stock_class: Any = type(module)
    module.__class__ = patched_class(mixin, stock_class)
    module.__dict__["actcompress"] = settings


def unpatch_instance(module: nn.Module) -> None:
    """Restore the stock class of a patched module."""
    module.__class__ = module.stock_class  # type: ignore[assignment]
    del module.__dict__["actcompress"]


# what a module carries that only a call, and not its forward, runs
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: Any) -> bool:
    """Whether somebody wants to see the module called."""
    return any(module.__dict__.get(hooks) for hooks in HOOKS)


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP or ZeRO-3 frees the module's own parameters when its unit is not in use."""
    if module.__dict__.get("_is_fsdp_managed_module", False):
        return True
    return any(hasattr(p, "ds_id") for p in module._parameters.values())


def recording(*tensors: Tensor | None) -> bool:
    """Whether autograd is on and these are ordinary tensors: not under torch.func transforms, not distributed.

    Elsewhere the stock code runs.
    """
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return not any(hasattr(x, "placements") for x in tensors if x is not None)


def keeps_for_backward(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors keeps anything for backward that ours could keep better."""
    return recording(*tensors) and any(x.requires_grad for x in tensors if x is not None)
