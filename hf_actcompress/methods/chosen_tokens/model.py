"""Which tokens of a batch get gradients: chosen once per forward, for all layers."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config import CompressionConfig
from ...errors import UnsupportedModelError
from ...models.arguments import arguments, is_cache
from ...private_apis import transforms_or_export

# losses whose labels stand at the position that predicts them
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification")

_Scores = Callable[[int, int, torch.device], Tensor]


class Choice:
    """The tokens of one forward.

    Args:
        share: The share of the tokens of each sequence, rounded up.
        scores: (B, S, device) -> [B, S]: in each sequence, the tokens with the largest scores are chosen.
        shape: B, S of the tokens that the model was given; None if it was given none: its layers may get any shape.
        real: bool [B, S], False for padding, which is chosen last; None if there is none.
        ends: Whether the first and the last real token are always chosen, because a model with one prediction for each
            sequence reads one of them.
    """

    def __init__(
        self, share: float, scores: _Scores, shape: tuple[int, int] | None, real: Tensor | None, ends: bool
    ) -> None:
        self.share, self.scores, self.shape, self.real, self.ends = share, scores, shape, real, ends
        self._rows: dict[tuple[Any, ...], Tensor] = {}
        self._made: list[tuple[weakref.ref[Any], Tensor]] = []

    def rows(self, x: Tensor) -> Tensor | None:
        """The numbers of the chosen tokens, int64 [B, K], ascending; None for an x of which no tokens are left out."""
        if x.dim() != 3 or (self.shape is not None and x.shape[:2] != self.shape):
            return None
        key = *x.shape[:2], x.device
        count = math.ceil(self.share * x.size(1))
        if count >= x.size(1):
            return None
        if key not in self._rows:
            with torch.no_grad():
                self._rows[key] = self._ranked(*key).topk(count, dim=1).indices.sort(dim=1).values
        return self._rows[key]

    def _ranked(self, batch: int, tokens: int, device: torch.device) -> Tensor:
        scores = self.scores(batch, tokens, device).to(device, torch.float32)
        real = torch.ones_like(scores, dtype=torch.bool) if self.real is None else self.real.to(device)
        if self.ends:
            place = torch.arange(tokens, device=device).expand(batch, tokens)
            first = place.masked_fill(~real, tokens).amin(1, keepdim=True)
            last = place.masked_fill(~real, -1).amax(1, keepdim=True)
            scores = scores.masked_fill((place == first) | (place == last), math.inf)
        return scores.masked_fill(~real, -math.inf)

    def once(self, x: Any, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, once per forward for every x: rows of masks and of angles, which all layers share."""
        # what is made for one layer alone lives no longer than its x
        self._made = [entry for entry in self._made if entry[0]() is not None]
        for known, made in self._made:
            if known() is x:
                return made
        made = make()
        self._made.append((weakref.ref(x), made))
        return made


_choice: ContextVar[Choice | None] = ContextVar("chosen tokens", default=None)


def current_choice() -> Choice | None:
    """The tokens of the forward in progress; None if all get gradients."""
    return _choice.get()


@contextmanager
def choosing(choice: Choice | None) -> Iterator[None]:
    """While the block runs, layers compute gradients for these tokens alone."""
    token = _choice.set(choice)
    try:
        yield
    finally:
        _choice.reset(token)


def choice_of_call(
    model: nn.Module,
    stock: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CompressionConfig,
) -> Choice | None:
    """The tokens of one call of a model; None if all of them get gradients.

    Raises:
        UnsupportedModelError: The config's choice needs what this call does not have.
    """
    if config.tokens == 1 or not torch.is_grad_enabled() or transforms_or_export():
        return None
    given = arguments(stock, args, kwargs).get
    tokens = next((x for x in map(given, ("input_ids", "inputs_embeds")) if isinstance(x, Tensor)), None)
    shape = None if tokens is None else (tokens.size(0), tokens.size(1))
    mask, labels = given("attention_mask"), given("labels")
    real = mask != 0 if isinstance(mask, Tensor) and mask.shape == shape else None
    scores = _SCORES.get(config.token_choice)  # type: ignore[call-overload]
    if scores is None:
        found = _losses(model, stock, args, kwargs, labels) if config.token_choice == "loss" else None
        if found is None:
            found = _asked(config.token_choice, stock, args, kwargs)
        if found.shape != shape:
            raise UnsupportedModelError(
                f"token_choice={config.token_choice!r} gave scores of shape {list(found.shape)} for tokens of shape "
                f"{None if shape is None else list(shape)}; it has to give one for each token"
            )
        scores = _fixed(found)
    per_token = isinstance(labels, Tensor) and labels.shape == shape
    return Choice(config.tokens, scores, shape, real, not per_token)


def _random(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.rand(batch, tokens, device=device)


def _last(batch: int, tokens: int, device: torch.device) -> Tensor:
    return torch.arange(tokens, device=device).expand(batch, tokens)


_SCORES: dict[object, _Scores] = {"random": _random, "last": _last}


def _fixed(scores: Tensor) -> _Scores:
    return lambda batch, tokens, device: scores


def _asked(choice: Any, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The scores that the user's function returns for the arguments of the model's forward, by name."""
    with torch.no_grad():
        found = choice(dict(inspect.signature(stock).bind_partial(*args, **kwargs).arguments))
    if not isinstance(found, Tensor):
        raise UnsupportedModelError(
            f"token_choice gave a {type(found).__name__}; it has to return a tensor [B, S] of scores, of which the "
            "largest are chosen"
        )
    return found


def _losses(
    model: nn.Module, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], labels: Any
) -> Tensor:
    """The loss of each token, fp32 [B, S], by a forward without gradients; -1 for a token that predicts nothing."""
    with torch.no_grad():
        # it would fill a cache, which the forward that follows fills once more
        args = tuple(None if is_cache(value) else value for value in args)
        output = stock(*args, **{name: value for name, value in kwargs.items() if not is_cache(value)})
    logits = getattr(output, "logits", None)
    if (
        not isinstance(logits, Tensor)
        or not isinstance(labels, Tensor)
        or logits.dim() != 3
        or logits.shape[:-1] != labels.shape
    ):
        raise UnsupportedModelError(
            f'token_choice="loss" needs labels [B, S] and logits [B, S, V] of a call of {type(model).__name__}; take '
            '"random" or "last", or hand a function over that scores the tokens'
        )
    if getattr(model, "loss_type", None) not in _UNSHIFTED:
        labels = functional.pad(labels[:, 1:], (0, 1), value=-100)
    # a sequence at a time: logits in fp32 are large
    return torch.stack([_loss_of(row, targets.to(row.device)) for row, targets in zip(logits, labels, strict=True)])


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    losses = functional.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-100)
    return losses.masked_fill(targets == -100, -1.0)
