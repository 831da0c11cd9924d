"""The pictures of a vision-language model's batch: one per sequence, in the layout that the model's forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ....errors import ModelConfigError
from ....private_apis import unset_fake_temporarily

# side of a picture for models that take any size, and the input that says how many patches it has
_SIDE, _GRID = 448, "image_grid_thw"
_VISION = ("vision_config", "vision_tower_config", "backbone_config")
# inputs that mark which tokens of the sequence belong to a picture
_MARKS = ("token_type_ids", "mm_token_type_ids")
# inputs of layouts in which the rows of patches are padded, which are not supported
_NOT_KNOWN = ("spatial_shapes", "pixel_position_ids", "image_position_ids")


def unwrapped(model: Any) -> Any:
    """The model inside of PEFT's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes_pictures(model: Any) -> bool:
    """Whether the forward takes both tokens and pictures."""
    model = unwrapped(model)
    names = inspect.signature(type(model).forward).parameters
    return "input_ids" in names and "pixel_values" in names and _vision(model) is not None


def described(model: Any) -> str:
    """A sentence for users that says which pictures are assumed."""
    (height, width), (down, across) = _size(unwrapped(model))
    return f"a picture of {height} x {width} ({down * across:,} patches) in each sequence, whose tokens include its own"


def pictures(model: Any, rows: int, seq_len: int) -> dict[str, Tensor]:
    """One picture for each of `rows` sequences, and the other inputs that go with it. Call it in the FakeTensorMode.

    Returns:
        Arguments of the forward. Those that say how many patches a picture has are real tensors, because forwards read
        their values.

    Raises:
        ModelConfigError: The model takes pictures in a layout that is not known here.
    """
    model = unwrapped(model)
    names, vision = inspect.signature(type(model).forward).parameters, _vision(model)
    if any(name in names for name in _NOT_KNOWN):
        raise ModelConfigError(
            f"{type(model).__name__} takes its pictures as padded rows of patches, which an estimate does not make; "
            "memory_report(model, batch) measures the model on a batch of yours"
        )
    marks = {name: torch.empty(rows, seq_len, dtype=torch.int64) for name in _MARKS if name in names}
    if _GRID in names:
        return {**marks, **_patches(model, vision, rows, seq_len)}
    one = (_channels(vision), *_size(model)[0])
    if "aspect_ratio_ids" in names:
        tiles = vision.max_num_tiles
        shapes = {
            "aspect_ratio_ids": (1,),
            "aspect_ratio_mask": (1, tiles),
            "cross_attention_mask": (seq_len, 1, tiles),
        }
        places = {name: torch.empty(rows, *shape, dtype=torch.int64) for name, shape in shapes.items()}
        return {**marks, **places, "pixel_values": pixels(model, rows, 1, tiles, *one)}
    if hasattr(model.config, "image_grid_pinpoints"):
        # height and width of the whole picture, which is its only tile
        sizes = {"image_sizes": _real([list(one[1:])] * rows)}
        return {**marks, **sizes, "pixel_values": pixels(model, rows, 2, *one)}
    # models that cut a picture into tiles get one tile
    tiles = (1,) if "pixel_attention_mask" in names else ()
    return {**marks, "pixel_values": pixels(model, rows, *tiles, *one)}


def _patches(model: Any, vision: Any, rows: int, seq_len: int) -> dict[str, Tensor]:
    """The patches of all pictures in one list, and the number of patches of each."""
    down, across = _size(model)[1]
    height, width = pair(vision.patch_size)
    depth = _channels(vision) * getattr(vision, "temporal_patch_size", 1) * height * width
    found = {"pixel_values": pixels(model, rows * down * across, depth), _GRID: _real([[1, down, across]] * rows)}
    if hasattr(getattr(model, "model", None), "get_rope_index"):
        # time, height and width of each token, which the model would compute from the tokens' values
        found["position_ids"] = torch.empty(3, rows, seq_len, dtype=torch.int64)
    return found


def pixels(model: Any, *shape: int) -> Tensor:
    """An empty picture in the dtype of the model's weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.empty(shape, dtype=dtype)


def _channels(vision: Any) -> int:
    return next((getattr(vision, k) for k in ("num_channels", "in_channels", "in_chans") if hasattr(vision, k)), 3)


def _real(values: Any) -> Tensor:
    with unset_fake_temporarily():
        return torch.tensor(values)


def _size(model: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of a picture, and the number of patches in each direction."""
    vision = _vision(model)
    patch = pair(getattr(vision, "patch_size", 14))
    any_size = _GRID in inspect.signature(type(model).forward).parameters
    size = pair(_SIDE if any_size else vision.image_size)
    count = size[0] // patch[0], size[1] // patch[1]
    return ((count[0] * patch[0], count[1] * patch[1]) if any_size else size), count


def _vision(model: Any) -> Any:
    config = getattr(model, "config", None)
    return next((getattr(config, name) for name in _VISION if getattr(config, name, None) is not None), None)


def pair(size: Any) -> tuple[int, int]:
    """Height and width, of which a config states one if they are equal."""
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
