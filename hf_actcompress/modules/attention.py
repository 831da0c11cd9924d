"""Patched attention modules: the stock forward, which is made to find our attention function instead of "sdpa"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .base import PatchedModule

if TYPE_CHECKING:

    class _Module(PatchedModule, nn.Module):
        pass
else:
    _Module = PatchedModule

# under this name models/attention.py registers the function; free of "sdpa" and "flash", which transformers looks for
ATTENTION_NAME = "hf_actcompress"


class _ConfigView:
    """A model's config as one attention module sees it: the same attributes, live, but for the attention's name."""

    def __init__(self, config: Any) -> None:
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_config"), name)
        return ATTENTION_NAME if name == "_attn_implementation" and value == "sdpa" else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_config"), name, value)


class AttentionMixin(_Module):
    """The config is looked at through a view; the model's own config is not touched and still builds sdpa's masks."""

    @property
    def config(self) -> Any:
        config = self.__dict__["config"]
        return config if torch.compiler.is_compiling() else _ConfigView(config)

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config
