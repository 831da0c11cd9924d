"""Builds a model of diffusers from its config on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import MissingExtraError, ModelConfigError
from ...quick.diffusion import CLASS, family_of
from .fake_step.stand_ins import checkpoint_block
from .meta_device import ONE_AT_A_TIME, OnMeta


def diffusion_model(config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model of a config, with weights as `from_pretrained(..., torch_dtype=dtype)` has them.

    Raises:
        ModelConfigError: Its class is not known here, or does not take the config.
        MissingExtraError: diffusers is not installed.
    """
    name = config[CLASS]
    family_of(name)
    try:
        import diffusers
    except ImportError as error:
        raise MissingExtraError(f"{name} needs diffusers, which is not installed: pip install diffusers") from error
    cls: Any = getattr(diffusers, name)
    try:
        with ONE_AT_A_TIME, OnMeta(torch.float32):
            model: nn.Module = cls.from_config(dict(config))
    except Exception as error:  # of any model's code, about a config that it does not take
        said = " ".join(str(error).split())
        raise ModelConfigError(f"{name} cannot be made from this config: {type(error).__name__}: {said}") from error
    # from_pretrained leaves these parts in fp32
    whole = frozenset(cls._keep_in_fp32_modules or ())
    for path, x in model.state_dict(keep_vars=True).items():
        if x.is_floating_point() and not whole & frozenset(path.split(".")):
            x.data = x.data.to(dtype)
    return model


def checkpoint_blocks(model: Any) -> None:
    """Switch gradient checkpointing on. Raises ModelConfigError for a model that has none."""
    try:
        model.enable_gradient_checkpointing(checkpoint_block)
    except ValueError as error:
        raise ModelConfigError(f"{type(model).__name__} offers no gradient checkpointing") from error
