"""Layers that compute gradients for the chosen tokens alone (TokenTune, arXiv 2501.18824).

A layer runs twice: on all tokens without gradients, and on the chosen ones with them. Rows meet in attention alone, so
the second run is right if its attention sees the keys and values of all tokens: those of the other tokens come from
the first run, as constants. That is proved by the first call of each layer: both runs have to give the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...compiling import is_compiling
from ...config import CompressionConfig
from ...errors import UnsupportedModelError
from ...models.arguments import argument_names, is_cache
from ...models.checkpointing import find_checkpoint_input
from ...models.sites import Site
from ...modules.base import stock_type
from ...modules.checkpoint import (
    CHECKPOINT_FUNCTION,
    CheckpointInputMixin,
    CheckpointSettings,
    forward_after_unpatching,
)
from ...private_apis import FakeTensor
from ...roles import Role
from .model import current_choice
from .model_keys_and_values import KeysAndValues, unwatched
from .op import chosen_rows, merged_rows

_PROVED = "actcompress_proved"
# the largest difference of the two runs, relative to what the layer adds to its input
_TOLERANCE = 0.02


class ChosenTokensMixin(CheckpointInputMixin):
    """A layer that computes gradients for the chosen tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ChosenTokensMixin):
            return forward_after_unpatching(self, *args, **kwargs)
        if is_compiling() and self.actcompress is not None:
            return self._not_compiled(*args, **kwargs)
        stock = super().forward  # type: ignore[misc]
        choice = current_choice()
        if self.actcompress is None or choice is None or not torch.is_grad_enabled():
            return stock(*args, **kwargs)
        names = argument_names(self.stock_class.forward)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x = given.pop(names[0])
        rows = choice.rows(x)
        if rows is None:
            return self._checkpointed(partial(stock, **given), x)
        return self._run(stock, KeysAndValues(choice, rows, x.size(1)), x, given)

    @torch.compiler.disable
    def _not_compiled(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def _run(self, stock: Callable[..., Any], keys: KeysAndValues, x: Tensor, given: dict[str, Any]) -> Any:
        """What the layer returns, with gradients of the chosen rows."""
        of_rows = {name: keys.of_rows(value) for name, value in given.items()}
        if _PROVED not in self.__dict__ and not isinstance(x, FakeTensor):
            _prove(self, stock, keys, x, given, of_rows)
        with torch.no_grad(), keys.noted():
            found = stock(x, **given)
        chosen = self._checkpointed(partial(_used, keys, stock, of_rows), chosen_rows(x, keys.rows))
        if not isinstance(found, tuple):
            return merged_rows(chosen, found, keys.rows)
        return merged_rows(chosen[0], found[0], keys.rows), *found[1:]

    def _checkpointed(self, run: Callable[..., Any], x: Tensor) -> Any:
        """``run(x)``, recomputed in backward if gradient checkpointing is on."""
        if self.gradient_checkpointing and self.training:  # type: ignore[attr-defined]
            return super()._gradient_checkpointing_func(run, x)
        return run(x)

    @property
    def _gradient_checkpointing_func(self) -> Callable[..., Any]:
        """What checkpoints the whole layer; a plain call if only the chosen tokens' run is checkpointed."""
        return super()._gradient_checkpointing_func if current_choice() is None else _called

    @_gradient_checkpointing_func.setter
    def _gradient_checkpointing_func(self, function: Callable[..., Any]) -> None:
        CheckpointInputMixin._gradient_checkpointing_func.fset(self, function)  # type: ignore[attr-defined]


def _called(layer: Callable[..., Any], *args: Any) -> Any:
    return layer(*args)


def _used(keys: KeysAndValues, stock: Callable[..., Any], of_rows: dict[str, Any], x: Tensor) -> Any:
    with keys.used():
        return stock(x, **of_rows)


_NO_ATTENTION = (
    'tokens < 1 needs attention that a model asks transformers\' interface for, as "sdpa"; {} calls none. Load the '
    'model with attn_implementation="sdpa"; if it has no such attention, patch it with tokens=1.0'
)
_MIXED = (
    "tokens < 1 needs layers in which tokens meet in attention alone; {} run on the chosen tokens gives something else "
    "than on all of them (a relative difference of {:.2g}). Patch it with tokens=1.0"
)


@torch.no_grad()
def _prove(
    layer: Any, stock: Callable[..., Any], keys: KeysAndValues, x: Tensor, kwargs: dict[str, Any],
    of_rows: dict[str, Any],
) -> None:  # fmt: skip
    """Raise an error unless both runs, without dropout, give the same for the chosen tokens. Once for each layer."""
    training = [module for module in layer.modules() if module.training]
    layer.eval()
    try:
        with keys.noted():
            found = _first(stock(x, **{name: None if is_cache(value) else value for name, value in kwargs.items()}))
        if not keys:
            raise UnsupportedModelError(_NO_ATTENTION.format(stock_type(layer).__name__))
        before = chosen_rows(x, keys.rows)
        with keys.used(), unwatched():
            again = _first(stock(before, **of_rows))
    finally:
        for module in training:
            module.training = True
    expected = chosen_rows(found, keys.rows)
    error, size = (again - expected).float().norm(), (expected - before).float().norm()
    rounding = 8 * torch.finfo(expected.dtype).eps * expected.float().norm()
    if not bool(error <= _TOLERANCE * size + rounding):
        raise UnsupportedModelError(_MIXED.format(stock_type(layer).__name__, float(error / size)))
    layer.__dict__[_PROVED] = True


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


def refuse_choice(model: nn.Module, config: CompressionConfig) -> None:
    """Raise UnsupportedModelError if the config asks for chosen tokens and the model does not support them."""
    if config.tokens == 1:
        return
    kinds = [type(m).__name__ for m in model.modules() if getattr(getattr(m, "config", None), "is_encoder_decoder", 0)]
    if kinds:
        raise UnsupportedModelError(
            f"tokens < 1 was asked of {kinds[0]}, an encoder-decoder: it has two sequences. Patch it with tokens=1.0"
        )
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UnsupportedModelError(
            f"tokens < 1 was asked of {type(model).__name__}, which has none of transformers' layers. Patch it with "
            "tokens=1.0"
        )


def find_chosen_tokens(layer: nn.Module, config: CompressionConfig) -> Site | None:
    """The site of a layer that computes gradients for chosen tokens; None if the config does not ask for that."""
    if config.tokens == 1 or not isinstance(layer, GradientCheckpointingLayer):
        return None
    site = find_checkpoint_input(layer, config)
    function = layer.__dict__.get(CHECKPOINT_FUNCTION)
    settings = CheckpointSettings(Role.TOKENS, function=function) if site is None else site.settings
    choice = config.token_choice if isinstance(config.token_choice, str) else "a function"
    return Site(ChosenTokensMixin, replace(settings, role=Role.TOKENS, kind=choice))
