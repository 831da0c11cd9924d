"""Where a model says what is padding: the `attention_mask` of its forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..private_apis import transforms_active
from ..records import Padding, padding_of


def padding_of_call(model: nn.Module, given: Mapping[str, Any]) -> Padding | None:
    """The padding of one call of `model` with those arguments, if it can be dropped.

    Only a mask [B, S] says which rows are padding; of one with more dimensions, or of several sequences
    (`why_not`), nothing is dropped.
    """
    if why_not(model) or not torch.is_grad_enabled() or transforms_active():
        return None
    mask = given.get("attention_mask")
    # only a plain tensor has values to read; a fake or distributed one has none
    if type(mask) is not Tensor or mask.dim() != 2 or mask.device.type == "meta":
        return None
    return padding_of(mask)


def why_not(model: nn.Module) -> str:
    """Why no rows of a model are left out, as padding or as copies; "" if they are."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return "rows are kept whole: an encoder-decoder has two sequences, each with rows of its own"
    return ""
