"""Which rows of a call are not kept: padding, or beginnings that other sequences share; by the forward's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import SharedRowsError
from ..private_apis import transforms_or_export
from ..records import Padding, RepeatedRows, padding_of, repeated_rows_of
from .arguments import cache_in

# the arguments that say what a token is
_OF_TOKENS = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
# other arguments, on which hidden states do not depend
_OTHERS = ("labels", "shift_labels", "cache_position", "logits_to_keep", "num_items_in_batch")
# values of which nothing differs between rows
_PLAIN = (bool, int, float, str, type(None))
# fields of configs for dropout that is a function and no module
_DROPOUTS = ("attention_dropout", "attention_probs_dropout_prob", "activation_dropout", "dropout", "hidden_dropout")


def why_not(model: nn.Module) -> str:
    """Why no rows of a model are left out, as padding or as copies; "" if they are."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "rows are kept whole: an encoder-decoder has two sequences, each with rows of its own"
    return ""


def padding_of_call(model: nn.Module, given: Mapping[str, Any]) -> Padding | None:
    """The padding of one call of `model` with those arguments, if it can be dropped.

    Only a mask [B, S] says which rows are padding; of one with more dimensions, or of several sequences
    (`why_not`), nothing is dropped.
    """
    if why_not(model) or not torch.is_grad_enabled() or transforms_or_export():
        return None
    mask = given.get("attention_mask")
    # only a plain tensor has values to read; a fake or distributed one has none
    if type(mask) is not Tensor or mask.dim() != 2 or mask.device.type == "meta":
        return None
    return padding_of(mask)


def copies_of_call(model: nn.Module, given: Mapping[str, Any]) -> RepeatedRows | None:
    """The repeated rows of one call of `model`; None if nothing is kept, or if unknown arguments may make rows differ.

    Raises:
        SharedRowsError: Sequences begin with the same tokens, but their hidden states would differ.
    """
    if why_not(model) or not torch.is_grad_enabled() or transforms_or_export():
        return None
    cache, mask = cache_in(given.values()), given.get("attention_mask")
    tokens = [given[name] for name in _OF_TOKENS if given.get(name) is not None]
    known = (*_OF_TOKENS, *_OTHERS)
    unknown = [value for name, value in given.items() if name not in known and value is not cache]
    # rows may differ by what is in a tensor, or in an object such as another library's cache
    if not all(isinstance(x, _PLAIN) for x in tree_leaves(unknown)) or any(type(x) is not Tensor for x in tokens):
        return None
    ids = tokens[0] if tokens else None
    if ids is None or ids.dim() != 2 or ids.is_floating_point() or ids.size(0) < 2 or ids.device.type == "meta":
        return None
    if cache is not None and cache.get_seq_length() > 0:
        return None
    # positions that are given once for all sequences do not differ between them
    of_each = [x for x in tokens if x.dim() == 0 or x.size(0) > 1]
    if any(x.shape != ids.shape for x in of_each):
        return None
    copies = repeated_rows_of(of_each, mask)
    if copies is not None and (reason := _why_rows_differ(model)):
        raise SharedRowsError(
            f"share_prompts=True keeps rows of tokens once that begin several sequences of the batch, and {reason}: "
            "set dropout to 0, or patch with share_prompts=False"
        )
    return copies


def _why_rows_differ(model: nn.Module) -> str:
    """Why equal beginnings of sequences have different hidden states; "" if they have the same."""
    for name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            return f"tokens see what follows them in {name} ({type(module).__name__})"
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            return f"{name} drops out for each row by itself (p={module.p})"
    config = getattr(model, "config", None)
    for field in _DROPOUTS if model.training else ():
        if getattr(config, field, 0.0):
            return f"the config's {field} is {getattr(config, field)}"
    return ""
