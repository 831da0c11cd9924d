"""What a patched module becomes: a subclass of its own type that adds one mixin.

The class is made on first use, once per (mixin, type). Instances deep-copy and pickle by (mixin, type), so a file
written by `torch.save` needs this package and the stock class, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .. import compilation
from ..codecs import IDENTITY, Codec
from ..codecs.table import CODECS
from ..errors import UnsupportedModelError
from ..private_apis import FakeTensor, as_in_first_run, is_idle_capture, transforms_or_export
from ..records import current, may_write
from ..roles import Role

_NAMES = {codec: name for name, codec in CODECS.items()}


@dataclass(frozen=True)
class Settings:
    """The settings of a patched module. A mixin that needs more of them has a subclass of this class beside it.

    Attributes:
        role: What the module is to this package.
        kind: The kind of the module, among those that its mixin knows, such as "gelu" or "transposed".
        codec: The codec through which the tensor is kept.
        keeps: Which tensor is kept.
        note: Why it keeps something else than the config asks for.
    """

    role: Role
    kind: str = ""
    codec: Codec = IDENTITY
    keeps: str = "input"
    note: str = ""
    # a compiler reads this name, because it would guard every field of every codec of the table
    codec_name: str = field(init=False, compare=False, repr=False)

    @property
    def reported(self) -> str:
        """What a report says that the module keeps."""
        return self.keeps

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec_name", _NAMES.get(self.codec.row, compilation.PLAIN))


class PatchedModule:
    """Base of the mixins. `stock_class` is the type before patching, and what unpatching restores.

    A module without settings runs its stock forward. Other libraries make such modules by ``type(layer)(...)`` of a
    patched layer, as PEFT does for the adapters of a convolution.
    """

    stock_class: ClassVar[type[nn.Module]]
    # how the name of the patched class begins, as `repr(model)` shows it
    prefix: ClassVar[str] = "ActCompress"
    actcompress: Settings | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        stock: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        return (_new, (type(self).__bases__[0], self.stock_class), *stock[2:])

    def stock_forward(self) -> Callable[..., Any]:
        """The bound stock forward, as a partial: torch 2.11 cannot trace a bound method or give it to a Function."""
        return partial(self.stock_class.forward, self)

    @torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
        reason="this preset keeps shares, signs or codes of activations, whose constants torch cannot trace with "
        "dynamic=True; without it the preset works, for lengths that change, too"
    )
    def _untraced(self, x: Tensor) -> Tensor:
        """Run the module in eager mode, behind a graph break; with fullgraph=True torch raises an error."""
        y: Tensor = self.forward(x)  # type: ignore[attr-defined]
        return y

    def _replicate_for_data_parallel(self) -> Any:
        # the replicas would share the forward of the original, which computes on the original's device
        raise UnsupportedModelError(
            "nn.DataParallel cannot replicate a patched model; start one process per GPU (torchrun, accelerate launch) "
            "for DDP, or show one GPU to the process (CUDA_VISIBLE_DEVICES=0)"
        )


if TYPE_CHECKING:
    # for the type checker the mixins are modules, which they are once combined with their stock class
    class ModuleMixin(PatchedModule, nn.Module):
        pass
else:
    ModuleMixin = PatchedModule


def stock_type(module: nn.Module) -> type[nn.Module]:
    """The stock type of a module, whether it is patched or not."""
    return module.stock_class if isinstance(module, PatchedModule) else type(module)


def code_of(module: PatchedModule) -> Callable[..., Any]:
    """The stock forward of a patched module, for a snapshot that runs it on copies of the module."""
    return module.stock_forward()


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
    for name in ("actcompress", "actcompress_proved"):
        module.__dict__.pop(name, None)


def settings_of(module: nn.Module) -> Settings | None:
    """The settings of a patched module; None for a stock module."""
    return module.actcompress if isinstance(module, PatchedModule) else None


# attributes of every module
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module's class has set on it, such as sizes and constants: its attributes that not every module has."""
    # a forward in the instance is another library's
    return {name: x for name, x in vars(module).items() if name not in _OF_EVERY_MODULE and name != "forward"}


@dataclass(frozen=True)
class FoundWith:
    """Attributes of a module that decide what it computes, as they were when a rule found it.

    Attributes that begin with an underscore are left out, because other libraries keep their notes there.
    """

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, module: nn.Module, but: tuple[str, ...]) -> FoundWith:
        """All of them but those of these names, which each forward reads, or no forward."""
        own = own_attributes(module).items()
        return cls(tuple((n, _value(x)) for n, x in own if n not in but and n[0] != "_" and not isinstance(x, Tensor)))

    def holds(self, module: nn.Module) -> bool:
        now = module.__dict__
        for name, value in self.values:
            x = now.get(name)
            if x is not value and _value(x) != value:
                return False
        return True


def _value(x: Any) -> Any:
    """What a copy of the attribute has in common with it: the function of a partial or of a bound method."""
    if isinstance(x, partial):
        return x.func, x.args, tuple(x.keywords.items())
    return getattr(x, "__func__", x)


# where a module keeps its hooks, which a call of the module runs and a call of its forward does not
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_hooks(module: Any) -> bool:
    """Whether the module has hooks that do something now; they run only when the module itself is called.

    Where a checkpointed region runs again, whether it had such hooks in the first run.
    """
    return _has_hooks(module) if compilation.is_traced() else as_in_first_run(module, _has_hooks)


def _has_hooks(module: Any) -> bool:
    # torch 2.11 cannot trace an expression that names `hooks` for itself
    for kind in HOOKS:
        hooks = module.__dict__.get(kind)
        if hooks and are_wanted(hooks):
            return True
    return False


def are_wanted(hooks: Mapping[int, Any]) -> bool:
    """Whether one of these hooks does something when its module is called now."""
    return not all(map(is_idle_capture, hooks.values()))


def keeps_output(settings: Settings) -> bool:
    """Whether a module keeps its output now: not where a hook of the user may write on it unseen by autograd."""
    return settings.keeps == "output" and not may_write()


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP or ZeRO-3 frees the module's own parameters when its unit is not in use."""
    if module.__dict__.get("_is_fsdp_managed_module", False):
        return True
    return any(hasattr(p, "ds_id") for p in module._parameters.values())


# types whose objects hold just their values. An object of a subclass may be a quantised weight, a shard of one, or
# logits that are not computed yet. Fake tensors count as plain, so that an estimate takes the path of the training.
PLAIN_TENSORS = frozenset({Tensor, nn.Parameter, nn.Buffer, FakeTensor})


# The next two functions have loops, because `all` and `any` would call a generator once per tensor: in every step, and
# torch.compile would trace each of these calls.
def recording(*tensors: Tensor | None) -> bool:
    """Whether autograd records in reverse mode and all of these are plain tensors. If not, the stock code runs.

    It also runs under transforms of torch.func, in forward-mode differentiation, in an export, whose program may be
    loaded where this package is not installed, and inside of a tile, of which nothing is kept.
    """
    if not torch.is_grad_enabled() or current.stock_only or transforms_or_export():
        return False
    for x in tensors:  # noqa: SIM110
        if x is not None and type(x) not in PLAIN_TENSORS:
            return False
    return True


def takes_gradient(*tensors: Tensor | None) -> bool:
    """Whether all of these tensors are plain and one requires a gradient: `keeps_for_backward` while `recording()`."""
    found = False
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN_TENSORS:
                return False
            found = found or x.requires_grad
    return found


def keeps_for_backward(*tensors: Tensor | None) -> bool:
    """Whether a call on these tensors keeps anything for backward, so that our op is worth running."""
    return recording() and takes_gradient(*tensors)


def only_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor of a call that has one argument, whatever its name is; None for any other call."""
    if len(args) + len(kwargs) != 1:
        return None
    x = args[0] if args else next(iter(kwargs.values()))
    return x if isinstance(x, Tensor) else None
