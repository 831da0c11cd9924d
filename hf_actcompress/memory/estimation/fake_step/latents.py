"""The batch of a model of diffusers: latents, times and the states of a caption, all of which the training has cached.

The loss is the mean squared error that flow matching and DDPM train by; its target is a part of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ....errors import ModelConfigError
from ....quick.diffusion import FAMILIES, Latents
from .pictures import unwrapped

TARGET = "target"
# tokens of the picture that Wan's models of pictures to videos read
_PICTURE_TOKENS = 257
# SDXL: sizes of the picture and of its part
_TIME_IDS = 6


def class_of(model: Any) -> str | None:
    """The class of diffusers, of those that are known, of a model that may be patched or wrapped; None for others."""
    return next((cls.__name__ for cls in type(unwrapped(model)).__mro__ if cls.__name__ in FAMILIES), None)


def latents_batch(model: Any, rows: int, latents: Latents) -> dict[str, Any]:
    """A batch of so many rows. Call it in the FakeTensorMode.

    Raises:
        ModelConfigError: The model takes inputs that are not known here.
    """
    inner = unwrapped(model)
    made = _Inputs(rows, latents, inner.config, inner.dtype)
    return _FAMILIES[str(class_of(inner))](made)


def prediction(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """What the model says of a batch."""
    found: Tensor = model(**{name: x for name, x in batch.items() if name != TARGET}, return_dict=False)[0]
    return found


def prediction_loss(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """The loss, in fp32 as in the scripts of diffusers."""
    target: Tensor = batch[TARGET]
    return (prediction(model, batch).float() - target.float()).square().mean()


def tensors_of(batch: Mapping[str, Any]) -> list[Tensor]:
    """All tensors of a batch, those in dictionaries included."""
    return [x for x in tree_leaves(dict(batch)) if isinstance(x, Tensor)]


class _Inputs:
    """Makes the inputs of one batch."""

    def __init__(self, rows: int, latents: Latents, config: Any, dtype: torch.dtype) -> None:
        self.rows, self.latents, self.config, self._dtype = rows, latents, config, dtype
        self.grid = latents.height, latents.width

    def numbers(self, *shape: int) -> Tensor:
        """An empty tensor of the weights' dtype, with the rows in front."""
        return torch.empty(self.rows, *shape, dtype=self._dtype)

    def whole(self, *shape: int) -> Tensor:
        """Likewise of whole numbers."""
        return torch.empty(self.rows, *shape, dtype=torch.int64)

    def caption(self, width: int) -> dict[str, Tensor]:
        return {"encoder_hidden_states": self.numbers(self.latents.pictures.text_tokens, width)}

    def maps(self, name: str, *shape: int) -> dict[str, Tensor]:
        """Latents as maps [B, C, ...], and the target, which may have fewer channels."""
        channels = self.config.in_channels
        wanted = self.config.out_channels or channels
        return {name: self.numbers(channels, *shape), TARGET: self.numbers(wanted, *shape)}

    def rows_of_tokens(self) -> dict[str, Tensor]:
        """Likewise as tokens [B, S, C]."""
        channels, tokens = self.config.in_channels, self.latents.tokens
        wanted = self.config.out_channels or channels
        return {"hidden_states": self.numbers(tokens, channels), TARGET: self.numbers(tokens, wanted)}


def _flux(made: _Inputs) -> dict[str, Any]:
    config, dtype = made.config, made.numbers().dtype
    places = {"img_ids": made.latents.tokens, "txt_ids": made.latents.pictures.text_tokens}
    batch = {**made.rows_of_tokens(), **made.caption(config.joint_attention_dim), "timestep": made.numbers()}
    batch |= {name: torch.empty(count, 3, dtype=dtype) for name, count in places.items()}
    batch["pooled_projections"] = made.numbers(config.pooled_projection_dim)
    return batch | ({"guidance": made.numbers()} if config.guidance_embeds else {})


def _sd3(made: _Inputs) -> dict[str, Any]:
    pooled = {"pooled_projections": made.numbers(made.config.pooled_projection_dim), "timestep": made.whole()}
    return {**made.maps("hidden_states", *made.grid), **made.caption(made.config.joint_attention_dim), **pooled}


def _wan(made: _Inputs) -> dict[str, Any]:
    batch = {**made.maps("hidden_states", made.latents.frames, *made.grid), **made.caption(made.config.text_dim)}
    if made.config.image_dim is not None:
        batch["encoder_hidden_states_image"] = made.numbers(_PICTURE_TOKENS, made.config.image_dim)
    return {**batch, "timestep": made.whole()}


def _ltx(made: _Inputs) -> dict[str, Any]:
    mask = {"encoder_attention_mask": made.whole(made.latents.pictures.text_tokens), "timestep": made.whole()}
    sizes = dict(zip(("num_frames", "height", "width"), (made.latents.frames, *made.grid), strict=True))
    return {**made.rows_of_tokens(), **made.caption(made.config.caption_channels), **mask, **sizes}


def _unet(made: _Inputs) -> dict[str, Any]:
    config = made.config
    width = config.encoder_hid_dim or config.cross_attention_dim
    batch: dict[str, Any] = {**made.maps("sample", *made.grid), "timestep": made.whole()}
    batch |= made.caption(width if isinstance(width, int) else width[0])
    added = config.addition_embed_type
    if added not in (None, "text_time") or config.class_embed_type is not None or config.num_class_embeds is not None:
        what = "num_class_embeds" if added in (None, "text_time") else f"addition_embed_type {added!r}"
        raise ModelConfigError(
            f"an estimate makes no inputs for a UNet2DConditionModel with {what}; memory_report measures it on yours"
        )
    if added == "text_time":
        states = config.projection_class_embeddings_input_dim - _TIME_IDS * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {"text_embeds": made.numbers(states), "time_ids": made.numbers(_TIME_IDS)}
    return batch


_FAMILIES: dict[str, Callable[[_Inputs], dict[str, Any]]] = dict(
    zip(FAMILIES, (_flux, _sd3, _wan, _ltx, _unet), strict=True)
)
