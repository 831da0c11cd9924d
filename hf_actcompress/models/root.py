"""The forwards of the transformers models in a patched model: each is bounded by a registry frame.

Every PreTrainedModel in the tree gets a patched forward, because other libraries call inner ones past the outermost:
TRL's fused loss calls the decoder below the language-modelling head, a retrieval model calls each of its encoders. The
first one that is called does what has to be done once for all models inside of it.

A PreTrainedModel's class must stay (output capture is keyed by it), so the forward is bound on the instance. PEFT calls
`model.forward` directly, past hooks, which an instance attribute survives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING

from .. import compilation
from ..codecs.table import CODECS
from ..compiling import is_compiling
from ..config import CompressionConfig
from ..methods.chosen_tokens.model import choice_of_call, choosing
from ..methods.gact.model import refresh_bits
from ..modules.hooked import hooks_of, watch
from ..private_apis import transforms_or_export
from ..records import (
    ModuleHooks,
    Padding,
    RepeatedRows,
    dropping,
    frame,
    in_frame,
    netted,
    places_of,
    without_inference,
)
from ..reference.rng import Generators
from .arguments import arguments, cache_in
from .heads import deferred_logits
from .packed_masks import packed_forward
from .rows_left_out import copies_of_call, padding_of_call
from .samples import samples_of_call

_ATTRIBUTE = "actcompress_root"
_DEFAULT_LOSS = "ForCausalLM"
# the forward before which bits are measured for the first time
_FIRST_REFRESH = 10
# patches new modules below a module of that name; an argument, because this package must not import the one above
_Patch = Callable[[nn.Module, CompressionConfig, str, Generators], object]
# the children of each module that has any
_Structure = list[tuple[dict[str, Any], tuple[Any, ...]]]


class PatchedForward:
    """The forward of one PreTrainedModel of a patched model. Deep-copies and pickles with the model.

    Args:
        model: The PreTrainedModel, or the patched module itself if it holds none.
        name: Its dotted name in the module that `patch_model` was called with.
        config: What the model was patched with.
        patch: Patches what is new below it.
        generators: The generators that the stochastic codecs of the whole model draw from.
    """

    def __init__(
        self, model: nn.Module, name: str, config: CompressionConfig, patch: _Patch, generators: Generators
    ) -> None:
        self.model = model
        self.name = name
        self.patch = patch
        self.config = config
        self.generators = generators
        self.inner: Callable[..., Any] | None = model.__dict__.get("forward")
        self.active = True
        # how many training forwards there were, and whether this one measures bits
        self._forwards, self._measuring = 0, False
        self._known: _Structure | None = None
        self.note_structure()

    def __getstate__(self) -> dict[str, Any]:
        # a copy has to look up its own modules
        return {**self.__dict__, "_known": None, "_hooks": [], "_hook_places": []}

    @property
    def __signature__(self) -> inspect.Signature:
        """The stock signature: Trainer drops dataset columns by it."""
        return inspect.signature(self._stock())

    @property
    def __code__(self) -> CodeType:
        """The stock forward's code: torch.export reads where it is written."""
        code: CodeType = inspect.unwrap(self._stock()).__code__  # type: ignore[attr-defined]
        return code

    def _stock(self) -> Callable[..., Any]:
        stock: Callable[..., Any] = self.inner or type(self.model).forward.__get__(self.model)
        return stock

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:
            # accelerate's `unwrap_model(model, keep_fp32_wrapper=False)` binds what it finds as if it were a function
            args = args[1:]
        if self.active and self.config.tokens < 1 and is_compiling():
            return self._not_compiled(*args, **kwargs)
        if is_compiling():
            return self._traced(args, kwargs)
        if not self.active:
            return self._stock()(*args, **kwargs)
        stock = self._stock()
        if torch.is_grad_enabled():
            args, kwargs = without_inference((args, kwargs))
        given = arguments(stock, args, kwargs)
        with self._outermost(stock, given, args, kwargs), deferred_logits(self.model, given) as finished:
            # the masks of chosen tokens are cut out of whole masks
            plain = self.inner is None and self.config.tokens == 1
            packed = packed_forward(self.model, args, kwargs) if plain else None
            return finished((packed or stock)(*args, **kwargs))

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The stock forward in a graph.

        A model without a loss type, such as GPT-2, logs a warning where it falls back to the default loss, and a
        warning breaks the graph. So it is given that loss, for this forward: Trainer goes on to see no loss type.
        """
        compilation.note_trace()
        model: Any = self.model
        trained = self.active and torch.is_grad_enabled()
        unnamed = trained and isinstance(model, PreTrainedModel) and getattr(model, "loss_type", None) is None
        unnamed = unnamed and not hasattr(model, "_loss_function")
        if unnamed:
            # torch 2.11 would run the setter of `loss_function` once more, after the deletion below
            model._loss_function = LOSS_MAPPING[_DEFAULT_LOSS]
        # torch 2.11 cannot trace how `_stock` binds it
        inner = self.inner
        try:
            return type(model).forward(model, *args, **kwargs) if inner is None else inner(*args, **kwargs)
        finally:
            if unnamed:
                del model._loss_function

    @torch.compiler.disable
    def _not_compiled(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    @contextmanager
    def _outermost(
        self, stock: Callable[..., Any], given: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        """A context for what is done once per forward, whichever of the models inside was called first."""
        if in_frame():
            yield
            return
        self._patch_new_modules()
        seen = watch(self._hooks)
        if self.config.refresh_bits and not self._measuring:
            self._refresh_bits(args, kwargs)
        # a config asks for one of them at most
        rows: Padding | RepeatedRows | None = None
        if self.config.drop_padding:
            rows = padding_of_call(self.model, given)
        elif self.config.share_prompts:
            rows = copies_of_call(self.model, given)
        if self.config.gradient_norms:
            self.generators.samples = samples_of_call(self.model, given)
        # nodes do not show what a hook has written, so nothing is recomputed from what they keep
        on = not seen and not transforms_or_export() and self.config.net and self.config.derive_linear
        other = CODECS[self.config.other].drawing_from(self.generators)
        net = netted(other) if on else nullcontext()
        choice = choice_of_call(self.model, stock, args, kwargs, self.config)
        with frame(), dropping(rows), choosing(choice), ModuleHooks(self._hook_places, seen, self).on(), net:
            yield

    def measure_bits_next(self) -> None:
        """Let the next training forward measure the bits, so that a report of a later step of the training is right."""
        self._forwards = _FIRST_REFRESH - 1

    def _refresh_bits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Measure the bits anew if it is time. Not with a cache, because each of these forwards would fill it again."""
        if not (self.model.training and torch.is_grad_enabled()) or cache_in((*args, *kwargs.values())) is not None:
            return
        self._forwards += 1
        if self._forwards != _FIRST_REFRESH and self._forwards % self.config.refresh_bits:
            return
        self._measuring = True
        try:
            refresh_bits(self.model, partial(self, *args, **kwargs), self.config, self.generators)
        finally:
            self._measuring = False

    def _patch_new_modules(self) -> None:
        """Patch all modules that are new since the last forward, such as injected adapters and resized heads."""
        known = self._known
        if known is None or any(tuple(children.values()) != before for children, before in known):
            self.patch(self.model, self.config, self.name, self.generators)
            self.note_structure()

    def note_structure(self) -> None:
        """Note that all modules below the model are patched now."""
        modules = list(self.model.modules())
        self._known = [(m._modules, tuple(m._modules.values())) for m in modules if m._modules]
        self._hooks, self._hook_places = hooks_of(modules), places_of(modules)


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Every PreTrainedModel in the tree by its dotted name, outer ones first; the module itself if there is none."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}
    return found or {"": model}


def root_module(model: nn.Module) -> nn.Module:
    """The outermost transformers model, e.g. inside a PeftModel; the module itself if it holds none."""
    return next(iter(pretrained_models(model).values()))


def name_default_loss(model: nn.Module) -> None:
    """Give a model without a loss type, such as GPT-2's, the one that transformers falls back to.

    Transformers logs a warning where it falls back, which torch.compile cannot trace. Not for a model that is trained:
    Trainer divides the loss of a model with a loss type in another way.
    """
    if model.__dict__.get("loss_type", _DEFAULT_LOSS) is None:
        model.__dict__["loss_type"] = _DEFAULT_LOSS


def install_roots(model: nn.Module, config: CompressionConfig, patch: _Patch, generators: Generators) -> None:
    """Bind the patched forwards that are not there yet. `patch` is called when the modules below have changed."""
    for name, module in pretrained_models(model).items():
        if not is_root(module):
            root = PatchedForward(module, name, config, patch, generators)
            module.__dict__[_ATTRIBUTE] = root
            module.__dict__["forward"] = root


def root_of(model: nn.Module) -> PatchedForward | None:
    """The outermost patched forward of a model, which has its config; None if the model is not patched."""
    return next((m.__dict__[_ATTRIBUTE] for m in model.modules() if is_root(m)), None)


def is_root(module: nn.Module) -> bool:
    """Whether the module carries a patched forward."""
    return _ATTRIBUTE in module.__dict__


def restore_root(module: nn.Module) -> None:
    """Remove the patched forward. If something else wraps it, it stays there and only calls the forward below it."""
    root: PatchedForward = module.__dict__.pop(_ATTRIBUTE)
    root.active = False
    if module.__dict__.get("forward") is root:
        if root.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = root.inner
