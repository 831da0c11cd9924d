"""The batch of a step on fake tensors."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ....errors import ModelConfigError
from ....private_apis import FakeTensorMode
from .latents import latents_batch
from .pictures import pair, pictures, pixels, takes_pictures, unwrapped
from .setting import Setting


def fake_batch(model: Any, setting: Setting, mode: FakeTensorMode, *, text_only: bool = False) -> dict[str, Any]:
    """A batch without padding, all of whose labels count, with pictures if the model takes them beside its text.

    Raises:
        ModelConfigError: The model's forward takes no labels, or an input that is not known here; or a length of the
            labels was given for a model without a decoder.
    """
    if setting.latents is not None:
        with mode:
            return latents_batch(model, setting.batch_size, setting.latents)
    b, s = setting.batch_size, setting.seq_len
    outer = unwrapped(model)
    known = inspect.signature(type(outer).forward).parameters
    name = type(outer).__name__
    main = getattr(outer, "main_input_name", "input_ids")
    if "labels" not in known or main not in ("input_ids", "pixel_values"):
        raise ModelConfigError(
            f"{name} takes {main} and {'labels' if 'labels' in known else 'no labels'}; an estimate is made for models "
            "of input_ids or pixel_values that compute their loss from labels (the ...For... classes)"
        )
    if setting.target_len is not None and not outer.config.is_encoder_decoder:
        raise ModelConfigError(f"{name} has no decoder beside an encoder: its labels are as long as its inputs")
    with mode:
        one_per_row = "ForSequenceClassification" in name or "ForImageClassification" in name
        labels = torch.empty((b,) if one_per_row else (b, setting.target_len or s), dtype=torch.int64)
        if main == "input_ids" or takes_pictures(outer):
            text = {"input_ids": torch.empty(b, s, dtype=torch.int64), "labels": labels}
            return {**text, **pictures(outer, b, s)} if takes_pictures(outer) and not text_only else text
        size = pair(outer.config.image_size)
        return {main: pixels(model, b, getattr(outer.config, "num_channels", 3), *size), "labels": labels}
