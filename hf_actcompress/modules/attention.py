"""Patched attention modules: the stock forward, which is made to find our attention function under another name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .base import PatchedModule

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule

# under these names models/ registers the functions; free of "sdpa" and "flash", which transformers looks for
ATTENTION_NAME = "hf_actcompress"
EAGER_NAME = "hf_actcompress_probabilities"
OURS = {"sdpa": ATTENTION_NAME, "eager": EAGER_NAME}


class _ConfigView:
    """A model's config as one attention module sees it: the same attributes, live, but for the attention's name."""

    def __init__(self, config: Any, patched: str) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_patched", patched)

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_config"), name)
        # whoever sets another implementation later gets that one
        same = name == "_attn_implementation" and value == object.__getattribute__(self, "_patched")
        return OURS[value] if same else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_config"), name, value)


class AttentionMixin(_Module):
    """The config is looked at through a view; the model's own is not touched and still builds the stock masks.

    Variant: the implementation that is replaced, "sdpa" or "eager".
    """

    @property
    def config(self) -> Any:
        if torch.compiler.is_compiling():
            # torch 2.11 cannot trace a look into __dict__ for the name of a property
            return self.actcompress.config
        return _ConfigView(self.__dict__["config"], self.actcompress.variant)

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config
        self.__dict__["actcompress"] = replace(self.actcompress, config=config)
