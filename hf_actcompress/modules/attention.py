"""Patched attention modules: their stock forward finds our attention function in the place of stock's."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from ..compiling import is_compiling
from .base import ModuleMixin, Settings

# under these names models/ registers our functions in transformers' attention interface
ATTENTION_NAME = "hf_actcompress"
EAGER_NAME = "hf_actcompress_probabilities"
OURS = {"sdpa": ATTENTION_NAME, "eager": EAGER_NAME}


class _AttentionName(str):
    """The stock name of an attention implementation, under which the attention interface finds our function.

    Model code compares the name (``in ("eager", "sdpa")``) to decide which mask it builds: all comparisons answer as
    the stock name does. A dictionary looks it up by its hash, which is that of our name.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or OURS[str(self)] == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(OURS[str(self)])

    def __str__(self) -> str:
        # return a plain str: `str(x)` of a subclass calls this method
        return str.__str__(self)


class _ConfigView:
    """A model's config as one attention module sees it: attention has another name, all else is the config's own."""

    def __init__(self, config: Any, patched: str) -> None:
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_patched", _AttentionName(patched))

    def __getattr__(self, name: str) -> Any:
        value = getattr(object.__getattribute__(self, "_config"), name)
        if name != "_attn_implementation":
            return value
        # if the config is set to another implementation later, that one is used
        patched = object.__getattribute__(self, "_patched")
        return patched if value == patched else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_config"), name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # for `isinstance(config, LlamaConfig)` in model code
        return type(object.__getattribute__(self, "_config"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # copying or pickling the view copies the config itself
        return object.__getattribute__(self, "_config").__reduce_ex__(protocol)


def renamed(config: Any) -> Any:
    """A config that names our attention, for a compiler: it cannot trace the view."""
    copied = copy.copy(config)
    copied.__dict__["_attn_implementation_internal"] = ATTENTION_NAME
    return copied


@dataclass(frozen=True, kw_only=True)
class AttentionSettings(Settings):
    """The settings of attention, and what it needs of its module's config.

    Attributes:
        config: The module's own, which the mixin shadows.
        renamed: A copy of it that names our function, for a compiler; None where one traces the stock function: that of
            eager attention, and where the module's code compares the name.
        roundings: For an eager function, the dtype of its softmax, and the dtype that the probabilities are cast to.
    """

    config: Any = field(compare=False, repr=False)
    renamed: Any = field(default=None, compare=False, repr=False)
    roundings: tuple[str, str] = ("", "")


class AttentionMixin(ModuleMixin):
    """The module sees its config through a view. The model's own config is not changed and builds the stock masks.

    Kind: the implementation that is replaced, "sdpa" or "eager".
    """

    actcompress: AttentionSettings | None

    @property
    def config(self) -> Any:
        settings = self.actcompress
        if settings is None:
            return self.__dict__["config"]
        if is_compiling():
            # torch 2.11 cannot trace a look into __dict__ for the name of a property
            named = settings.renamed is not None and settings.config._attn_implementation == settings.kind
            return settings.renamed if named else settings.config
        return _ConfigView(self.__dict__["config"], settings.kind)

    @config.setter
    def config(self, config: Any) -> None:
        self.__dict__["config"] = config
        if self.actcompress is not None:
            named = None if self.actcompress.renamed is None else renamed(config)
            self.__dict__["actcompress"] = replace(self.actcompress, config=config, renamed=named)
