"""Which modules run again in backward while their linear layers do not: attention and scans of a model's own making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import Cache, PreTrainedModel

from ..codecs.table import CODECS
from ..config import CompressionConfig
from ..modules.base import Settings, settings_of
from ..modules.selective import SelectiveMixin
from ..ops import PackedMask
from ..private_apis import BatchNormBase
from ..records import is_foreign
from ..roles import RUN_BY_PLANS, Role
from .adapters import is_adapter
from .attention_rows import copy_in_rows
from .empty_cache import EmptyCache
from .linear_attention import copy_in_segments, segment_of
from .sites import Site
from .source import names_in

# functions that keep much and may run again: products of activations, softmax, scans, a GELU written out
_KEEPING = frozenset({"baddbmm", "bmm", "cumsum", "einsum", "erf", "exp", "logsumexp", "matmul", "softmax", "softplus"})
# functions that decide something. They must not run again, because a codec may have changed their input
_DECIDING = frozenset({"argmax", "argmin", "argsort", "bucketize", "multinomial", "nonzero", "sort", "topk", "unique"})
_LINEAR = frozenset({Role.CONV2D, Role.LINEAR, Role.OWN_LINEAR})
# modules that decide themselves what to keep, or that hold whole layers
_OTHERS = frozenset(
    {
        *RUN_BY_PLANS, Role.ATTENTION, Role.BATCH_NORM, Role.CHECKPOINT_INPUT, Role.EXPERTS, Role.LOSS_HEAD,
        Role.SELECTIVE,
    }
)  # fmt: skip
_LAYERS = (BatchNormBase, PreTrainedModel, nn.ModuleList, nn.RNNBase)
# the largest share of weights outside of linear layers to those inside, as their products are computed twice
_SMALL = 0.25


@dataclass(frozen=True, kw_only=True)
class SelectiveSettings(Settings):
    """How a module that runs again is computed in parts.

    Args:
        segment: How many tokens of a linear attention are computed at a time; 0: all.
        in_rows: Whether eager attention computes some rows of queries at a time.
    """

    segment: int = 0
    in_rows: bool = False


class CachedSelectiveMixin(SelectiveMixin):
    """The mixin for modules that run again in backward and may get a cache of keys and values as an argument.

    In a training forward that cache is still empty, so the second run gets a new empty one.

    Eager attention computes some rows of queries at a time if its mask follows from positions, so that the mask need
    not be made. Then it keeps queries, keys and values, and does not run again as a whole. The backward of linear
    attention computes some tokens at a time if the config asks for tiles.
    """

    actcompress: SelectiveSettings | None

    def stock_forward(self) -> Callable[..., Any]:
        kind: Any = self.stock_class
        settings = self.actcompress
        found = copy_in_rows(kind) or copy_in_segments(kind, 0 if settings is None else settings.segment)
        if found is None or not found.is_of(kind):
            return super().stock_forward()
        return partial(found.copy, self)

    def kwargs_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The keyword arguments that the second run gets, with an `EmptyCache` in place of each cache.

        None if the module must not run again: a cache is not empty, attention computes rows by itself (`PackedMask`),
        or an argument is of an unknown type, to which a second run might write a second time.
        """
        if any(isinstance(value, Cache) for value in args):
            return None
        if any(isinstance(value, PackedMask) or is_foreign(value) for value in (*args, *kwargs.values())):
            return None
        caches = {name: value for name, value in kwargs.items() if isinstance(value, Cache)}
        layer = self.__dict__.get("layer_idx")
        if caches and layer is None:
            return None
        empty = {name: EmptyCache.of(cache, layer) for name, cache in caches.items()}  # type: ignore[arg-type]
        return None if None in empty.values() else empty

    @staticmethod
    def run_again(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The keyword arguments with new caches in place of the empty ones."""
        return stock(*args, **{k: v.new() if isinstance(v, EmptyCache) else v for k, v in kwargs.items()})


def find_selective(module: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of a module, whose children are patched, that has code of its own between their products."""
    if not (config.selective and config.net and config.derive_linear) or settings_of(module) is not None:
        return None
    if isinstance(module, (*_LAYERS, nn.ModuleDict, nn.Sequential)) or "forward" in module.__dict__:
        return None
    names = names_in(module)
    if not names & _KEEPING or names & _DECIDING or not _is_its_own(module, names) or not _has_small_rest(module):
        return None
    settings = SelectiveSettings(
        Role.SELECTIVE, codec=CODECS[config.other], keeps="outputs of linear layers", segment=segment_of(config),
        in_rows=_in_rows(type(module)),
    )  # fmt: skip
    return Site(CachedSelectiveMixin, settings)


def _in_rows(stock_class: Any) -> bool:
    return copy_in_rows(stock_class) is not None


def _is_its_own(module: nn.Module, names: frozenset[str]) -> bool:
    """Whether the module calls no fused kernel through the attention interface; such kernels keep statistics alone."""
    implementation = getattr(module.__dict__.get("config"), "_attn_implementation", None)
    return "ALL_ATTENTION_FUNCTIONS" not in names or implementation == "eager"


def _has_small_rest(module: nn.Module) -> bool:
    """Whether nearly all of its weights are in linear layers of ours, and no layer or other op of ours is inside."""
    linear = rest = 0
    pending: list[nn.Module] = [module]
    while pending:
        part = pending.pop()
        settings = settings_of(part)
        role = settings.role if settings is not None else ""
        if role in _OTHERS or (part is not module and isinstance(part, _LAYERS)):
            return False
        if role in _LINEAR or is_adapter(part):
            linear += sum(p.numel() for p in part.parameters())
            continue
        if not isinstance(part, nn.Embedding):
            rest += sum(p.numel() for p in part._parameters.values() if p is not None and p.dim() > 1)
        pending += part.children()
    return bool(linear) and rest <= _SMALL * linear
