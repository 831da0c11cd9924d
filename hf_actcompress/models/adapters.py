"""PEFT's layers: recognised only if PEFT has been imported; their children are ordinary leaves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..config import CompressionConfig
from ..errors import MissingExtraError, ModelConfigError
from ..modules.adapted_weights import adapts_a_weight
from ..modules.adapter import AdapterMixin
from ..modules.base import Settings
from ..roles import Role
from .sites import Declined, Site


def is_adapter(module: Any) -> bool:
    """Whether a module is a layer of PEFT's tuners."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return peft is not None and isinstance(module, peft.BaseTunerLayer)


def find_adapter(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of a PEFT tuner layer that casts its input."""
    casts = is_adapter(module) and hasattr(module, "_cast_input_dtype")
    return Site(AdapterMixin, Settings(Role.ADAPTER)) if casts else None


def rank_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The linear layers of a PEFT tuner layer whose inputs are as narrow as the adapter's rank (``lora_B``).

    Such an input is small compared to all others. A codec would cost time and accuracy and save next to no bytes.
    """
    width = getattr(module, "in_features", None)
    if not is_adapter(module) or not isinstance(width, int):
        return
    for name, child in module.named_modules():
        inside = name and not f".{name}.".startswith(".base_layer.")
        if inside and isinstance(child, nn.Linear) and child.in_features * 4 <= width:
            yield child


# the layers on which the scripts of diffusers put LoRA
DIFFUSION_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")


def with_adapter(model: Any, lora: Any) -> nn.Module:
    """A model of diffusers with LoRA by its own `add_adapter`; all its other weights are frozen.

    Args:
        lora: True (peft's default rank, on attention's queries, keys, values and outputs), a rank, or a LoraConfig.

    Raises:
        MissingExtraError: peft is not installed.
        ModelConfigError: It has no such layers.
    """
    lora = _lora_config(lora, list(DIFFUSION_TARGETS))
    model.requires_grad_(False)
    try:
        model.add_adapter(lora)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _no_lora(model, error) from error
    found: nn.Module = model
    return found


def with_lora(model: nn.Module, lora: Any) -> nn.Module:
    """The model with LoRA adapters.

    Args:
        lora: True (peft's defaults on all linear layers), a rank, or a peft LoraConfig.

    Raises:
        MissingExtraError: peft is not installed.
        ModelConfigError: peft has no LoRA for this model.
    """
    lora = _lora_config(lora, "all-linear")
    import peft

    try:
        adapted: nn.Module = peft.get_peft_model(model, lora)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise _no_lora(model, error) from error
    missed = [name for name in lora.target_parameters or () if not any(_adapts(m, name) for m in adapted.modules())]
    if missed:
        raise ModelConfigError(
            f"a {type(model).__name__} has no parameter {', '.join(missed)} for LoRA's target_parameters (experts that "
            "are packed have none); leave them out, or estimate the model without quantisation"
        )
    return adapted


def _adapts(module: Any, target: str) -> bool:
    """Whether it is the adapter of a parameter with that name, of which PEFT compares the end."""
    return is_adapter(module) and adapts_a_weight(module) and target.rpartition(".")[2] == module.parameter_name


def _lora_config(lora: Any, targets: Any) -> Any:
    """A LoraConfig for what was asked for."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("LoRA needs peft, which is not installed: pip install peft") from error
    if isinstance(lora, peft.LoraConfig):
        return lora
    return peft.LoraConfig(target_modules=targets, **({} if lora is True else {"r": int(lora)}))


def _no_lora(model: nn.Module, error: Exception) -> ModelConfigError:
    said = " ".join(str(error).split())
    return ModelConfigError(f"peft puts no LoRA on a {type(model).__name__}: {said} Pass a peft LoraConfig")
