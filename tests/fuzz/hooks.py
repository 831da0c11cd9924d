"""The hooks of the fuzz: what a forward hook does (`KINDS`), and the modules that it is put on (`PLACES`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

Read = Callable[[str, Tensor], None]
Change = Callable[[Tensor], Tensor | None]


def _read(_: Tensor) -> None:
    return None


def _replace(x: Tensor) -> Tensor:
    return x * 1.5


def _detach(x: Tensor) -> Tensor:
    return x.detach()


def _in_place(x: Tensor) -> None:
    x.mul_(1.5)


def _add_in_place(x: Tensor) -> None:
    x.add_(0.5)


def _data(x: Tensor) -> None:
    x.data[..., 0] = 0.5


def _scale_data(x: Tensor) -> None:
    x.data.mul_(1.5)


# a name with "pre-" is a hook on the inputs
CHANGES: dict[str, Change] = {
    "read": _read, "replace": _replace, "detach": _detach, "mul": _in_place, "add": _add_in_place, "data": _data,
    "scale-data": _scale_data,
}  # fmt: skip
KINDS: tuple[str, ...] = (
    *CHANGES, "pre-read", "pre-replace", "pre-mul", "pre-add", "pre-data", "pre-scale-data", "backward-read",
)  # fmt: skip


def _leaf_named(pattern: str) -> Callable[[str, nn.Module], bool]:
    """Modules without children, by the name of their class. A patched module's class is a subclass of that."""

    def found(_: str, module: nn.Module) -> bool:
        return not any(module.children()) and any(re.search(pattern, cls.__name__) for cls in type(module).__mro__)

    return found


def _named(pattern: str) -> Callable[[str, nn.Module], bool]:
    def found(name: str, _: nn.Module) -> bool:
        return re.search(pattern, name) is not None

    return found


# by the names that transformers gives to modules and classes
_INNER: dict[str, Callable[[str, nn.Module], bool]] = {
    "linear": _leaf_named(r"^(Linear|Conv1D|FalconLinear|NonDynamicallyQuantizableLinear)$"),
    "norm": _leaf_named(r"Norm"),
    "activation": _leaf_named(r"(GELU|Gelu|SiLU|ReLU|Tanh)"),
    "dropout": _leaf_named(r"^Dropout$"),
    "embedding": _leaf_named(r"Embedding$"),
    "attention": _named(r"\.(attn|attention|self_attn|self_attention|SelfAttention|self|mixer)$"),
    "mlp": _named(r"\.(mlp|DenseReluDense|intermediate|ffn)$"),
    "layer": _named(r"\.(layers|layer|h|block|blocks)\.[0-9]+$"),
}
PLACES: tuple[str, ...] = (*_INNER, "model", "root")


def modules_at(model: nn.Module, place: str) -> list[nn.Module]:
    """All modules of a place, in order. "model" is the one inside of the head, "root" the whole one."""
    if place == "root":
        return [model]
    base: Any = model.get_base_model() if hasattr(model, "peft_config") else model
    if place == "model":
        return [base.base_model]
    return [module for name, module in base.named_modules() if _INNER[place](name, module)]


def add_hook(model: nn.Module, kind: str, place: str, at: int, read: Read) -> list[Any]:
    """Put a hook on one of the modules of a place. Returns what removes it; nothing if the model has no such module."""
    found = modules_at(model, place)
    if not found:
        return []
    module = found[at % len(found)]
    if kind == "backward-read":
        return [module.register_full_backward_hook(lambda *_: None)]
    change = CHANGES[kind.removeprefix("pre-")]
    if kind.startswith("pre-"):
        return [module.register_forward_pre_hook(_on_input(change, read), with_kwargs=True)]
    return [module.register_forward_hook(_on_output(change, read))]


def _on_input(change: Change, read: Read) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = [*enumerate(args), *kwargs.items()]
        key, x = next(((k, v) for k, v in named if _is_activation(v)), (None, None))
        if x is None:
            return None
        read("input", x)
        y = change(x)
        if y is None:
            return None
        if isinstance(key, int):
            return (*args[:key], y, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: y}

    return hook


def _on_output(change: Change, read: Read) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        pairs: Sequence[tuple[Any, Any]] = [(None, output)]
        if isinstance(output, dict):
            pairs = list(output.items())
        elif isinstance(output, (tuple, list)):
            pairs = list(enumerate(output))
        key, x = next(((k, v) for k, v in pairs if _is_activation(v)), (None, None))
        if x is None:
            return None
        read("output", x)
        y = change(x)
        if y is None or key is None:
            return y
        if isinstance(output, dict):
            output[key] = y
            return output
        return type(output)((*output[:key], y, *output[key + 1 :]))

    return hook


def _is_activation(x: Any) -> bool:
    """Whether x is a tensor of hidden states, and not a loss."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 2
