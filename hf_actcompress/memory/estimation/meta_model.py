"""From whatever names a model to the model itself on the meta device: modules and shapes, no weights."""

from __future__ import annotations

import copy
import inspect
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_hf_file_metadata, hf_hub_url, is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto import modeling_auto
from transformers.utils import CONFIG_NAME

from ...errors import ModelConfigError, UnknownOptionError
from ...models.adapters import with_lora
from ..measurement.compiled import uncompiled
from .meta_device import OnMeta
from .quantized import packed_weights, quantize, stand_ins

# a config without usable `architectures` becomes the first of these that knows it
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

# seconds for an answer of the hub
_PATIENCE = 5

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16", "float": "float32"}


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype from a dtype or its name ("bfloat16", "bf16"). Raises UnknownOptionError."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    name = _SHORT.get(name, name)
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
        source: A module (it is copied, its weights are not), a transformers config, or the name of one: a folder with
            a config.json, that file or another JSON, or a model of the Hugging Face hub.
        dtype: Of the parameters. None: as they are; of a config, what it says or fp32.
        lora: None, True, a rank, or a peft LoraConfig.
        gradient_checkpointing: Switch it on. False leaves a module as it is.
        quantization: Of the linear layers' weights: "nf4", "fp4", "int8" or a `quantization_config`. None: as they
            are; of a config, what it says.
        trust_remote_code: Run code that comes with a config, where transformers has none of its own.

    Raises:
        ModelConfigError: No config can be had under that name, transformers has no model with a loss for it, or a
            module has sparse parameters or buffers.
    """
    if isinstance(source, nn.Module):
        module = uncompiled(source)
        packed = packed_weights(module)
        model = _on_meta(module, dtype)
        stand_ins(model, packed)
    else:
        config = source if isinstance(source, PretrainedConfig) else _config(source, trust_remote_code)
        quantization = quantization or getattr(config, "quantization_config", None)
        cls = _class_of(config, trust_remote_code)
        model = _from_config(cls, config, dtype or dtype_of(getattr(config, "dtype", None)) or torch.float32)
    if quantization is not None:
        quantize(model, quantization)
    if lora is not None and lora is not False:
        model = with_lora(model, lora)
    if gradient_checkpointing:
        _checkpoint(model)
    return model.train()


def _on_meta(module: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    memo: dict[int, Any] = {}
    for name, x in chain(module.named_parameters(), module.named_buffers()):
        if x.layout is not torch.strided:
            raise ModelConfigError(
                f"{name} is a sparse tensor ({x.layout}), whose size depends on its values, and an estimate has none; "
                "memory_report(model, batch) measures the model as it is"
            )
        wanted = dtype if dtype is not None and x.is_floating_point() else x.dtype
        memo[id(x)] = _empty_like(x, wanted, "meta")
    return copy.deepcopy(module, memo)


def empty_like(x: Tensor, device: str) -> Tensor:
    """x without its data, a parameter if it is one."""
    return _empty_like(x, x.dtype, device)


def _empty_like(x: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    empty = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    return nn.Parameter(empty, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else empty


def _from_config(cls: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers < 1:
        raise ModelConfigError(f"{cls.__name__} cannot have {layers} layers (num_hidden_layers)")
    config = copy.deepcopy(config)
    config.__dict__.pop("quantization_config", None)
    # as the Trainer has it
    config.use_cache = False
    try:
        with OnMeta(dtype):
            # without a dtype transformers does not exchange torch's default one
            model: nn.Module = cls._from_config(config, dtype=None)
    except Exception as error:  # of any model's code, about a config that it does not take
        raise ModelConfigError(f"{cls.__name__} cannot be made from this config: {_first_line(error)}") from error
    _note_dtype(config, dtype)
    model.tie_weights()  # type: ignore[operator]
    return model


def _note_dtype(config: Any, dtype: torch.dtype) -> None:
    """What transformers writes into the configs of a model that it makes in that dtype."""
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
    path = Path(name)
    looks_local = path.suffix == ".json" or path.is_absolute() or str(name).startswith((".", "~"))
    if looks_local and not path.expanduser().exists():
        raise ModelConfigError(f"no such file or folder: {name}; it should be a config.json or a folder that has one")
    local = looks_local or path.exists()
    # without a connection transformers tries for half a minute before it says so
    options: dict[str, Any] = {} if local or _reachable(str(name)) else {"local_files_only": True}
    try:
        # without an answer to it, transformers would ask on the console
        options["trust_remote_code"] = trust_remote_code
        return AutoConfig.from_pretrained(str(path.expanduser() if looks_local else name), **options)
    except Exception as error:  # the checks of configs raise errors of their own
        raise ModelConfigError(_help(str(name), error)) from error


def _reachable(name: str) -> bool:
    """Whether the hub answers for that model, be it that there is none; one short attempt."""
    if is_offline_mode():
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        return True
    except Exception:
        # what is raised without a connection depends on the HTTP library that the hub's client uses
        return False
    return True


def _help(name: str, error: Exception) -> str:
    said = _first_line(error)
    if "trust_remote_code" in str(error):
        return f"{name} needs code of its own, which its repository brings. {_TRUST}"
    if Path(name).exists():
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
    """What an error says, in one line; checks of a field say which in the first and why in the second."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, KeyError) or not lines:
        # which says the key alone
        lines = [type(error).__name__, *lines]
    return " ".join(lines[:2])


def _checkpoint(model: Any) -> None:
    # the name of transformers 5.23, and of before
    enable = getattr(model, "activation_checkpointing_enable", None) or getattr(
        model, "gradient_checkpointing_enable", None
    )
    if enable is None:
        raise ModelConfigError(f"{type(model).__name__} offers no gradient checkpointing")
    enable()
