"""Which samples a batch consists of, recognised by their contents, so that the user need not number them."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from ..private_apis import transforms_or_export


def samples_of_call(model: nn.Module, given: Mapping[str, Any]) -> Tensor | None:
    """Numbers int64 [B], on the host, of the sequences of one call: hashes of the model's main input [B, ...].

    Padding at the end of a sequence, by the mask [B, T], is not hashed, so that a sample keeps its number in batches of
    other lengths. None if there are no values to read.
    """
    if not torch.is_grad_enabled() or transforms_or_export():
        return None
    x = given.get(getattr(model, "main_input_name", "input_ids"))
    if type(x) is not Tensor or x.dim() < 2 or x.numel() == 0 or x.device.type == "meta":
        return None
    mask = given.get("attention_mask")
    lengths = [x.size(1)] * x.size(0)
    if type(mask) is Tensor and mask.shape == x.shape[:2]:
        last = mask.ne(0) * torch.arange(1, x.size(1) + 1, device=mask.device)
        lengths = last.amax(1).tolist()
    rows = x.detach().cpu().contiguous()
    data = [rows[i, :length].contiguous().view(-1).view(torch.uint8).numpy() for i, length in enumerate(lengths)]
    digests = [blake2b(row.tobytes(), digest_size=8).digest() for row in data]
    return torch.tensor([int.from_bytes(digest, signed=True) for digest in digests])
