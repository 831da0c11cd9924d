"""Makes a small layer of the same kind as a large one. A trial on it is cheap, and its result holds for the large one.

The layer's own class makes it, from a copy of the config with two heads. Then it gets what was done to the large layer:
patches, LoRA, dtypes, frozen weights. `proof` checks that both compute the same: it compares the tapes of their ops.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ..modules.adapter import AdapterMixin
from ..modules.base import HOOKS, settings_of, stock_type
from ..roles import Role
from .arguments import config_of, configs_of
from .refusal import NotStraight

_HEADS = 2
# the attribute of a layer that says whether checkpointing runs the layer again in backward
CHECKPOINTED = "gradient_checkpointing"
# the names that configs have for the width between the two products of an MLP
_WIDTHS = (
    "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "d_ff",
    "ffn_hidden_size",
)  # fmt: skip
_RATES = ("p", "dropout", "attention_dropout", "dropout_prob", "activation_dropout", "hidden_dropout")
_ALL_HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads")


def small_layer(layer: nn.Module, device: torch.device) -> nn.Module:
    """A layer of the same class in training, with two heads of the same width, and random weights on the device.

    Raises:
        NotStraight: None can be made.
    """
    kind = stock_type(layer)
    config = config_of(layer)
    try:
        # weights without data draw no random numbers
        with torch.device("meta"):
            small = kind(**_arguments(layer, kind, _small_config(config)))
        small = _alike(layer, small).to(device).train()
        for module in small.modules():
            if CHECKPOINTED in vars(module):
                vars(module)[CHECKPOINTED] = False
        return small
    except NotStraight:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error)[:100]}"
        raise NotStraight(f"no small layer of its kind can be made to try it: {what}") from error


def without_dropout(layer: nn.Module) -> nn.Module:
    """The same layer, after the rate of every dropout in it was set to 0."""
    for module in layer.modules():
        for name in _RATES:
            if isinstance(vars(module).get(name), float):
                vars(module)[name] = 0.0
    return layer


def _small_config(config: Any) -> Any:
    small = copy.deepcopy(config)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    for name in ("num_key_value_heads", "num_kv_heads"):
        kv_heads = getattr(config, name, None)
        if kv_heads is not None:
            setattr(small, name, _HEADS if kv_heads == heads else 1)
    for name in _ALL_HEADS:
        if getattr(config, name, None) is not None:
            setattr(small, name, _HEADS)
    small.hidden_size = _HEADS * (config.hidden_size // heads)
    for name in _WIDTHS:
        if isinstance(getattr(config, name, None), int):
            # a size that no other width has
            setattr(small, name, 3 * width)
    return small


def _arguments(layer: nn.Module, kind: type[nn.Module], config: Any) -> dict[str, Any]:
    """The arguments with which its class is called."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        known = [vars(m)[name] for m in layer.modules() if isinstance(vars(m).get(name), int)]
        if name == "config":
            found[name] = config
        elif known:
            found[name] = known[0]
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(f"its class asks for {name}")
    return found


def _alike(large: nn.Module, small: nn.Module) -> nn.Module:
    """The small module, after it was patched, adapted, frozen and cast as the large one was."""
    if isinstance(large, AdapterMixin):
        return _adapted(large, small)
    if stock_type(large) is not type(small) or large._modules.keys() != small._modules.keys():
        raise TypeError(f"{type(large).__name__} is no {type(small).__name__}")
    for name, child in large._modules.items():
        if child is not None:
            small._modules[name] = _alike(child, small._modules[name])  # type: ignore[arg-type]
    for name, weight in large._parameters.items():
        small._parameters[name] = _random(weight, small._parameters[name].shape) if weight is not None else None  # type: ignore[union-attr]
    for name, value in vars(large).items():
        # rates of dropout, and flags; not the sizes
        if isinstance(value, (bool, float, str)) or (
            isinstance(value, int) and type(value) is not type(vars(small).get(name))
        ):
            vars(small)[name] = value
    settings = settings_of(large)
    if settings is not None and settings.role not in (Role.LAYER, Role.CHECKPOINT_INPUT):
        small.__class__, vars(small)["actcompress"] = type(large), settings
    return small


def _adapted(large: nn.Module, small: nn.Module) -> nn.Module:
    """A LoRA layer around a small module."""
    base: Any = vars(large)["_modules"]["base_layer"]
    new: Any = _alike(base, small)
    memo: dict[int, Any] = {**configs_of(large), id(base): new}
    known = dict(zip(base.weight.shape, new.weight.shape, strict=True))
    outs, ins = new.weight.shape if isinstance(base, nn.Linear) else reversed(new.weight.shape)
    for path, weight in large.named_parameters():
        if path.startswith("base_layer."):
            continue
        # the rank stays: the first size of A, and the second of B
        if ".lora_A." in f".{path}":
            sizes = [weight.shape[0], ins]
        elif ".lora_B." in f".{path}":
            sizes = [outs, *weight.shape[1:]]
        elif ".lora_magnitude_vector." in f".{path}":
            sizes = [outs]
        else:
            sizes = [known.get(size, size) for size in weight.shape]
        memo[id(weight)] = _random(weight, sizes)
    copied = copy.deepcopy(large, memo)
    for module in copied.modules():
        vars(module).update((hooks, OrderedDict()) for hooks in HOOKS)
    return copied


def _random(weight: nn.Parameter, shape: Any) -> nn.Parameter:
    """Values as a trained layer has them, of the same dtype and device. Gains and offsets are near 1."""
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    noise = torch.randn(*shape, generator=generator, device="cpu")
    values = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    return nn.Parameter(values.to(weight.dtype), weight.requires_grad)
