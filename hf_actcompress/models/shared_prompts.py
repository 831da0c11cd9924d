"""Which tokens of a batch begin with the same ones as another sequence: out of what the model's forward is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..private_apis import transforms_active
from ..records import Copies, copies_of
from .arguments import argument
from .padding import why_not

# what says of a token what it is, beside `input_ids`
_OF_TOKENS = ("attention_mask", "position_ids", "token_type_ids")
# other inputs of the hidden states, which are not compared
_OTHERS = ("inputs_embeds", "pixel_values", "input_features", "encoder_hidden_states")


def copies_of_call(
    model: nn.Module, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Copies | None:
    """The repeated rows of one call of `model`; None where nothing is kept, or there may be other differences."""
    if why_not(model) or not torch.is_grad_enabled() or transforms_active():
        return None

    def given(name: str) -> Any:
        return argument(name, stock, args, kwargs)

    ids = given("input_ids")
    if type(ids) is not Tensor or ids.dim() != 2 or ids.size(0) < 2 or ids.device.type == "meta":
        return None
    cache = given("past_key_values")
    if any(given(name) is not None for name in _OTHERS) or (cache is not None and cache.get_seq_length() > 0):
        return None
    # positions of all sequences at once are the same for all
    tokens = [x for name in _OF_TOKENS if (x := given(name)) is not None and x.size(0) > 1]
    if any(x.shape != ids.shape for x in tokens):
        return None
    return copies_of([ids, *tokens])
