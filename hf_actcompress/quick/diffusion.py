"""Models of diffusers: where their configs are, and how large the latents of pictures and videos are. No torch here.

The factors are those of the VAEs that the pipelines of these classes have, and sizes that are not given are the
pipelines' own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from ..errors import ModelConfigError
from .hub import CONFIG_NAME, local_path

CLASS = "_class_name"
# folders of a pipeline that hold the model which is trained
_PARTS = ("transformer", "unet")
# Wan 2.2's smallest model has latents of 48 channels, of a VAE with twice the factor
_WIDE_WAN, _WIDE_FACTOR = 48, 16


@dataclass(frozen=True)
class Pictures:
    """What one sample of a batch is.

    Args:
        height, width: Pixels.
        frames: Pictures of a video; 1 for a picture.
        text_tokens: Tokens of the caption's states.
    """

    height: int
    width: int
    frames: int
    text_tokens: int


class PictureSizes(TypedDict, total=False):
    """Fields of `Pictures` as options; None: as usual."""

    height: int | None
    width: int | None
    frames: int | None
    text_tokens: int | None


@dataclass(frozen=True)
class LatentSizes:
    """The latents of one class of models.

    Args:
        usual: Sizes that are not given.
        factor: Pixels of a latent, in both directions.
        patch: Latents of a token, in both directions.
        frames: Frames of a latent beside the first one; 0 for a model of pictures.
    """

    usual: Pictures
    factor: int = 8
    patch: int = 2
    frames: int = 0


# a UNet has no tokens: here it is its latents
FAMILIES = {
    "FluxTransformer2DModel": LatentSizes(Pictures(1024, 1024, 1, 512)),
    "SD3Transformer2DModel": LatentSizes(Pictures(1024, 1024, 1, 333)),
    "WanTransformer3DModel": LatentSizes(Pictures(480, 832, 81, 512), frames=4),
    "LTXVideoTransformer3DModel": LatentSizes(Pictures(512, 704, 161, 128), factor=32, patch=1, frames=8),
    "UNet2DConditionModel": LatentSizes(Pictures(512, 512, 1, 77), patch=1),
}


@dataclass(frozen=True)
class Latents:
    """The latents of one sample.

    Args:
        pictures: What they are the latents of.
        frames, height, width: Latents in each direction; one frame for a model of pictures.
        patch: Latents of a token, in height and in width.
    """

    pictures: Pictures
    frames: int
    height: int
    width: int
    patch: int

    @property
    def tokens(self) -> int:
        """How many tokens they become."""
        return self.frames * (self.height // self.patch) * (self.width // self.patch)


def diffusion_config(source: Any) -> Mapping[str, Any] | None:
    """The config of a model of diffusers that `source` is or names; None for anything else.

    Raises:
        ModelConfigError: There is no such file or folder.
    """
    if isinstance(source, str | Path):
        path = local_path(str(source))
        if path is None:
            return None
        try:
            source = json.loads(config_path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # whoever reads configs of transformers says what is wrong with it
            return None
    return source if isinstance(source, Mapping) and isinstance(source.get(CLASS), str) else None


def config_path(path: Path) -> Path:
    """The config's file in a folder, which may be that of a pipeline of diffusers; a file is its own."""
    if not path.is_dir():
        return path
    inside = (path / part / CONFIG_NAME for part in _PARTS)
    return next((file for file in (path / CONFIG_NAME, *inside) if file.exists()), path / CONFIG_NAME)


def family_of(name: str) -> LatentSizes:
    """The family of a class. Raises ModelConfigError for one that is not known here."""
    if name not in FAMILIES:
        raise ModelConfigError(
            f"{name} is no class of diffusers that estimates are made for; known: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def latents_of(name: str, config: Mapping[str, Any], **sizes: Unpack[PictureSizes]) -> Latents:
    """The latents that a model of this class gets.

    Args:
        name: The model's class.
        config: Its config.
        sizes: Fields of `Pictures`; those that are None have the family's usual value.

    Raises:
        ModelConfigError: The class is not known, or a size is none that the model takes.
    """
    family = family_of(name)
    given: dict[str, Any] = {field: size for field, size in sizes.items() if size is not None}
    pictures = replace(family.usual, **given)
    factor = _WIDE_FACTOR if "Wan" in name and config.get("in_channels") == _WIDE_WAN else family.factor
    least = factor * family.patch
    for field in ("height", "width"):
        _check(name, field, getattr(pictures, field), least, 0)
    if not family.frames and pictures.frames != 1:
        raise ModelConfigError(f"{name} is a model of pictures, which have one frame; got frames={pictures.frames}")
    if family.frames:
        _check(name, "frames", pictures.frames, family.frames, 1)
    frames = (pictures.frames - 1) // family.frames + 1 if family.frames else 1
    return Latents(pictures, frames, pictures.height // factor, pictures.width // factor, family.patch)


def _check(name: str, field: str, size: int, step: int, beyond: int) -> None:
    if size > 0 and size % step == beyond % step:
        return
    near = max(size - beyond, step) // step * step + beyond
    more = f", plus {beyond}" if beyond else ""
    raise ModelConfigError(f"{field}={size} is no multiple of {step}{more}, as {name} has it; the nearest is {near}")
