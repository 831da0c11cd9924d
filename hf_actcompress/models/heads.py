"""Which module is a model's language-modelling head, and what becomes of its deferred logits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils import ModelOutput

from ..config import CompressionConfig
from ..modules.base import HOOKS, has_hooks, patched_class, stock_type
from ..modules.head import HeadMixin, HeadSettings, deferring
from ..ops import DeferredLogits, LinearSource, plain, returned_logits
from ..private_apis import is_idle_capture, transforms_or_export
from ..private_apis.fsdp import is_hook_of_fsdp, stays_whole, wrapped_class
from ..reference.logits_chunks import KEPT_BYTES, most_kept
from ..roles import Role
from .sites import Declined, Site


def output_layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules that compute the model's logits; several if PEFT has put trained copies beside the original one."""
    if not isinstance(model, PreTrainedModel):
        return ()
    try:
        head = model.get_output_embeddings()
    except Exception:  # some models without a head raise instead of returning None
        return ()
    if not isinstance(head, nn.Module):
        return ()
    copies = getattr(head, "modules_to_save", None)
    return (head, *copies.values()) if isinstance(copies, nn.ModuleDict) else (head,)


def find_head(module: nn.Module, config: CompressionConfig) -> Site | Declined | None:
    """The site of one of the `output_layers`, or why it is patched as any other module."""
    if not config.loss_head:
        return Declined(Role.LOSS_HEAD, "switched off (loss_head=False)")
    if hasattr(module, "modules_to_save"):
        return None  # the copies inside have rows of their own
    if not isinstance(module, nn.Linear) or stock_type(module) is not nn.Linear:
        return Declined(Role.LOSS_HEAD, f"the head is a {stock_type(module).__name__}, not a plain nn.Linear")
    if "forward" in module.__dict__:
        return Declined(Role.LOSS_HEAD, "forward is already bound on the instance")
    kind = "logits" if config.logits else "lazy_logits"
    # what is kept on the device would be most of what a step that offloads keeps there
    kept = most_kept(module.in_features, module.out_features, module.weight.element_size(), KEPT_BYTES)
    budget = 0 if config.offloads else kept
    return Site(HeadMixin, HeadSettings(Role.LOSS_HEAD, kind, targets=config.targets, budget=budget))


@contextmanager
def deferred_logits(model: nn.Module, given: Mapping[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """A context for a forward of `model`: its head defers the logits, for the model's own loss or one outside of it.

    Yields the function that the output has to go through.
    """
    # with labels the forward computes a loss
    labelled = given.get("labels") is not None
    if torch.is_grad_enabled():
        # in eval mode, too: a training may have switched dropout off in that way
        defers = not labelled or _stock_loss(model)
    else:
        # an evaluation. Not in inference mode, because its tensors have no version counter
        plain_mode = not torch.is_inference_mode_enabled() and not transforms_or_export()
        defers = labelled and plain_mode and _stock_loss(model)
    heads = _deferrable(model) if defers else ()
    if not heads:
        yield lambda output: output
        return
    with deferring(heads):
        yield partial(_without_unreturned, labelled=labelled)


def _stock_loss(model: nn.Module) -> bool:
    """Whether the loss comes out of torch's cross entropy. A kernel in its stead (Liger's) reads the logits' memory."""
    own = model.__dict__.get("_loss_function")
    known = own is None or any(own is loss for loss in LOSS_MAPPING.values())
    return known and nn.functional.cross_entropy.__module__ == "torch.nn.functional"


def _deferrable(model: nn.Module) -> tuple[HeadMixin, ...]:
    """Patched heads without hooks: a hook may do anything.

    FSDP2's are known, where the weights stay in memory from forward to backward, as Accelerate asks for.
    """
    plain = patched_class(HeadMixin, nn.Linear)
    return tuple(
        layer
        for layer in output_layers(model)
        if isinstance(layer, HeadMixin)
        and wrapped_class(layer) is plain
        and stays_whole(layer)
        and not _is_hooked(layer)
    )


def _is_hooked(layer: nn.Module) -> bool:
    """Whether it has hooks that are not FSDP2's."""
    hooks = (hook for kind in HOOKS for hook in layer.__dict__[kind].values())
    return has_hooks(layer) and not all(is_hook_of_fsdp(hook) or is_idle_capture(hook) for hook in hooks)


def _without_unreturned(output: Any, labelled: bool) -> Any:
    """The model's output with logits that may leave the forward; a key without a value is absent."""
    if isinstance(output, ModelOutput):
        values = {name: _without_unreturned(value, labelled) for name, value in output.items()}
        if all(values[name] is output[name] for name in values):
            return output
        # its constructor would put the keys in another order, and leave out what is no field
        found: Any = OrderedDict.__new__(type(output))
        found.__dict__.update(output.__dict__)
        for name, value in values.items():
            if value is None:
                setattr(found, name, None)
            else:
                found[name] = value
        return found
    if type(output) in (tuple, list):
        parts = [_without_unreturned(part, labelled) for part in output]
        return output if all(map(is_, parts, output)) else type(output)(parts)
    if isinstance(output, DeferredLogits) and isinstance(output.chain.source, LinearSource):
        return _returned(output, output.chain.source, labelled)
    return output


def _returned(logits: DeferredLogits, head: LinearSource, labelled: bool) -> Tensor | None:
    """The logits that the model returns; None if it can return none.

    Without labels, a loss outside of the model will differentiate the logits, so they are returned as deferred ones.
    With labels, the model has computed its loss, and the returned logits are hardly ever differentiated. So they are
    returned as a plain tensor, if the config asks for whole logits; so are those of a selection of rows. The hidden
    states of an estimate have no data: a step with labels then returns no logits, because nothing reads them.
    """
    if labelled and head.keep_logits:
        return plain(logits)
    if type(head.hidden) is not Tensor:
        return None if labelled and torch.is_grad_enabled() else plain(logits)
    deferred = returned_logits(logits)
    return plain(logits) if deferred is None else deferred
