"""Builds the model that a name, config or module stands for on the meta device: modules and shapes, no weights."""

from __future__ import annotations

import copy
import inspect
import os
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto

from ...errors import ActCompressError, ModelConfigError, UnknownOptionError
from ...models.adapters import with_adapter, with_lora
from ...quick.config_rules import QUANTIZATION, check_config
from ...quick.diffusion import diffusion_config
from ...quick.hub import local_path, reachable
from ...quick.question import SHORT_DTYPES
from ..measurement.compiled import uncompiled
from .diffusion_model import checkpoint_blocks, diffusion_model
from .fake_step.latents import class_of
from .meta_device import ONE_AT_A_TIME, OnMeta
from .quantized.model import packed_weights, quantize, stand_ins

# a config without usable `architectures` becomes the first of these classes that accepts it
_TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
)
_AUTO_CLASSES = (
    "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
)  # fmt: skip
_TRUST = (
    "Nothing of it was run. If you trust the repository, pass trust_remote_code=True (--trust-remote-code on the "
    "command line)"
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype for a dtype or its name ("bfloat16", "bf16"). Raises UnknownOptionError for another name."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    name = SHORT_DTYPES.get(name, name)
    if name not in DTYPES:
        raise UnknownOptionError("dtype", dtype, DTYPES)
    return DTYPES[name]


def skeleton(
    source: Any,
    dtype: torch.dtype | None,
    lora: Any,
    gradient_checkpointing: bool,
    quantization: Any = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """The model that `source` stands for, on the meta device, in train mode.

    Args:
        source: A module (it is copied without its weights), a transformers config, or the name of one: a folder with
            a config.json, that file or another JSON file, or a model of the Hugging Face hub.
        dtype: Dtype of the parameters. None: a module's own; for a config, what it says, or fp32.
        lora: None, True, a rank, or a peft LoraConfig.
        gradient_checkpointing: True switches it on. False leaves a module as it is.
        quantization: How the weights of linear layers are stored: "nf4", "fp4", "int8" or a `quantization_config`.
            None: a module's own; for a config, what it says.
        trust_remote_code: Run code that comes with a config, where transformers has none of its own.

    Raises:
        ModelConfigError: No config can be found under that name, transformers has no model with a loss for it, or a
            module has sparse parameters or buffers.
    """
    if isinstance(source, nn.Module):
        module = uncompiled(source)
        packed = packed_weights(module)
        model = _on_meta(module, dtype)
        stand_ins(model, packed)
    elif (stated := diffusion_config(source)) is not None:
        model = diffusion_model(stated, dtype or torch.float32)
    else:
        config = source if isinstance(source, PretrainedConfig) else _config(source, trust_remote_code)
        check_config(config.to_dict())
        quantization = quantization or getattr(config, "quantization_config", None)
        cls = _class_of(config, trust_remote_code)
        model = _from_config(cls, config, dtype or dtype_of(getattr(config, "dtype", None)) or torch.float32)
    if quantization is not None:
        _quantize(model, quantization)
    if lora is not None and lora is not False:
        model = with_lora(model, lora) if class_of(model) is None else with_adapter(model, lora)
    if gradient_checkpointing:
        _checkpoint(model)
    return model.train()


def _quantize(model: nn.Module, quantization: Any) -> None:
    if isinstance(quantization, dict):
        check_config({QUANTIZATION: quantization})
    try:
        quantize(model, quantization)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ActCompressError):
            raise
        said = f"{type(error).__name__}: {_first_line(error)}"
        raise ModelConfigError(f"the {QUANTIZATION} cannot be used: {said}; correct its options") from error


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    memo: dict[int, Any] = {}
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if x.layout is not torch.strided:
            raise ModelConfigError(
                f"{name} is a sparse tensor ({x.layout}), whose size depends on its values, and an estimate has none; "
                "memory_report(model, batch) measures the model as it is"
            )
        wanted = dtype if x.is_floating_point() else None
        memo[id(x)] = empty_like(x, "meta", wanted)
    return copy.deepcopy(module, memo)


def empty_like(x: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor like x on `device`, by default of the same dtype; a parameter if x is one."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype or x.dtype, device=device)
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _from_config(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    # the Trainer sets this as well
    config.use_cache = False
    try:
        with ONE_AT_A_TIME, OnMeta(dtype):
            # with dtype=None transformers does not change torch's default dtype
            model: nn.Module = cls._from_config(config, dtype=None)
    except Exception as error:  # of any model's code, about a config that it does not take
        raise ModelConfigError(f"{cls.__name__} cannot be made from this config: {_first_line(error)}") from error
    empty = next((name for name, p in model.named_parameters() if not p.numel()), None)
    if empty is not None:
        raise ModelConfigError(
            f"{cls.__name__} cannot be made from this config: {empty} would be empty; correct its sizes"
        )
    _note_dtype(config, dtype)
    model.tie_weights()  # type: ignore[operator]
    return model


def _note_dtype(config: Any, dtype: torch.dtype) -> None:
    """Write into the config and its parts what transformers writes when it makes a model in that dtype."""
    config.dtype = dtype
    for name in config.sub_configs:
        if getattr(config, name, None) is not None:
            _note_dtype(getattr(config, name), dtype)


def _class_of(config: Any, trust_remote_code: bool) -> Any:
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if cls is not None and "labels" in inspect.signature(cls.forward).parameters:
            return cls
    for task in _TASKS:
        known = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING", {})
        if type(config) in known:
            return known[type(config)]
    own = getattr(config, "auto_map", None) or {}
    named = next((own[name] for name in _AUTO_CLASSES if name in own), None)
    if named is not None:
        if not trust_remote_code:
            raise ModelConfigError(f"{type(config).__name__} is of a model with code of its own. {_TRUST}")
        return get_class_from_dynamic_module(named, config.name_or_path)
    raise ModelConfigError(
        f"transformers {transformers.__version__} has no model with a loss for a {type(config).__name__} "
        f"(architectures: {getattr(config, 'architectures', None)}); pass the model itself"
    )


def _config(name: Any, trust_remote_code: bool) -> Any:
    path = local_path(str(name))
    local, place = path is not None, str(path or name)
    # without a connection transformers retries for half a minute before it fails
    options: dict[str, Any] = {} if local or reachable(str(name)) else {"local_files_only": True}
    try:
        # if this is not set, transformers asks the user on the console
        options["trust_remote_code"] = trust_remote_code
        # before transformers, some of whose classes fail at such a config without naming a field
        stated = PretrainedConfig.get_config_dict(place)[0] if local else None
        if isinstance(stated, dict):
            check_config(stated)
        return AutoConfig.from_pretrained(place, **options)
    except ModelConfigError:
        raise
    except Exception as error:  # the checks of configs raise errors of their own
        raise ModelConfigError(_help(str(name), error)) from error


def _help(name: str, error: Exception) -> str:
    said = _first_line(error)
    if "trust_remote_code" in str(error):
        return f"{name} needs code of its own, which its repository brings. {_TRUST}"
    if os.path.exists(name):
        return f"{name} holds no config that transformers {transformers.__version__} can read: {said}" + (
            ' (it needs a "model_type" that this version knows)' if isinstance(error, (KeyError, ValueError)) else ""
        )
    if "gated" in str(error).lower() or "401" in str(error) or "403" in str(error):
        return (
            f"{name} is gated or private: {said} Accept its terms on its page and run `hf auth login`, or download "
            "its config.json by hand and pass the path to that file"
        )
    return (
        f"the config of {name!r} cannot be had: {said} Check the spelling and the connection; without one, pass the "
        "path to a config.json (no weights are needed) or to a folder that has it"
    )


def _first_line(error: Exception) -> str:
    """An error's message in one line. A config's check names the field in line one and the reason in line two."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) or not lines:
        # the message of a KeyError is the key alone
        lines = [type(error).__name__, *lines]
    return " ".join(lines[:2])


def _checkpoint(model: Any) -> None:
    if class_of(model) is not None:
        checkpoint_blocks(model)
        return
    # transformers 5.23 has this name, earlier versions the other one
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None:
        raise ModelConfigError(f"{type(model).__name__} offers no gradient checkpointing")
    enable()
