"""Pixels in every layout that models take: pictures, tiles of a picture, clips, rows of patches with their grids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

GRID = 4


def picture_batches(config: Any, names: dict[str, Any], shape: Any) -> Iterator[dict[str, Any]]:
    """Candidates for one picture (or clip) in each row, with what goes with them; nothing if the model takes none."""
    key: str | None = next(
        (k for k in ("pixel_values", "pixel_values_images", "pixel_values_videos", "input_values") if k in names), None
    )
    vision = vision_config(config)
    if key is None and "hidden_states" in names and "grid_thw" in names:
        key = "hidden_states"
    if key is None or (key == "input_values"):
        return
    height, width = image_size(vision)
    channels = next(
        (
            getattr(vision, k)
            for k in ("num_channels", "in_channels", "in_chans")
            if type(getattr(vision, k, None)) is int
        ),
        3,
    )
    if "image_grid_thw" in names or "grid_thw" in names or "image_grid_hws" in names:
        yield from _patch_rows(key, vision, names, shape, channels)
    if "spatial_shapes" in names or "pixel_position_ids" in names or "image_position_ids" in names:
        yield from _padded_patches(key, vision, names, shape, channels)
    if "image_token_id" in names or "aspect_ratio_ids" in names:
        yield from _tiles_with_aspect(key, vision, shape, channels, height, width)
    yield from _plain(key, vision, names, shape, channels, height, width)


def vision_config(config: Any) -> Any:
    """The part that describes the vision tower, or the config itself."""
    for name in (
        "vision_config",
        "backbone_config",
        "vit_config",
        "encoder",
        "visual",
        "image_config",
        "encoder_config",
    ):
        part = getattr(config, name, None)
        if isinstance(part, PretrainedConfig):
            return vision_config(part) if name == "backbone_config" else part
    return config


def image_size(vision: Any) -> tuple[int, int]:
    size = next(
        (
            getattr(vision, k)
            for k in ("image_size", "img_size", "input_size", "max_img_size")
            if getattr(vision, k, None)
        ),
        32,
    )
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _patch(vision: Any) -> int:
    size = next((getattr(vision, k) for k in ("patch_size", "spatial_patch_size") if getattr(vision, k, None)), 8)
    return size if isinstance(size, int) else int(size[-1])


def _patch_rows(key: str, vision: Any, names: dict[str, Any], shape: Any, channels: int) -> Iterator[dict[str, Any]]:
    """All patches of all pictures in one list, and the grid of each picture."""
    patch, rows = _patch(vision), shape.rows
    times = getattr(vision, "temporal_patch_size", None) or 1
    number = rows * GRID * GRID
    grid = torch.tensor([[1, GRID, GRID]] * rows)
    grids: dict[str, Any] = {
        k: (grid[:, 1:] if k == "image_grid_hws" else grid)
        for k in ("image_grid_thw", "grid_thw", "image_grid_hws")
        if k in names
    }
    if key == "pixel_values_videos":
        grids = {"video_grid_thw": grid}
    for size in (
        (number, channels * times * patch * patch),
        (number, channels, patch, patch),
        (number, channels * patch * patch),
        (rows, number // rows, channels * times * patch * patch),
    ):
        yield {key: shape.normal(*size), **grids}


def _padded_patches(
    key: str, vision: Any, names: dict[str, Any], shape: Any, channels: int
) -> Iterator[dict[str, Any]]:
    """Each picture's patches as a row, with their places."""
    patch, rows = getattr(vision, "model_patch_size", None) or _patch(vision), shape.rows
    number = GRID * GRID
    batch: dict[str, Any] = {key: shape.normal(rows, number, channels * patch * patch)}
    if "pixel_attention_mask" in names:
        batch["pixel_attention_mask"] = torch.ones(rows, number, dtype=torch.long)
    if "spatial_shapes" in names:
        batch["spatial_shapes"] = torch.tensor([[GRID, GRID]] * rows)
    places = torch.stack(torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="xy"), -1).view(1, number, 2)
    for name in ("pixel_position_ids", "image_position_ids"):
        if name in names:
            batch[name] = places.expand(rows, -1, -1)
    yield batch


def _tiles_with_aspect(
    key: str, vision: Any, shape: Any, channels: int, height: int, width: int
) -> Iterator[dict[str, Any]]:
    tiles = getattr(vision, "max_num_tiles", 1)
    rows = shape.rows
    mask = torch.zeros(rows, 1, tiles, dtype=torch.long)
    mask[..., 0] = 1
    yield {
        key: shape.normal(rows, 1, tiles, channels, height, width),
        "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
        "aspect_ratio_mask": mask,
    }


def _plain(
    key: str, vision: Any, names: dict[str, Any], shape: Any, channels: int, height: int, width: int
) -> Iterator[dict[str, Any]]:
    """Pictures, tiles and clips."""
    rows, one = shape.rows, (channels, height, width)
    several: list[tuple[int, ...]] = [(rows, 5), (rows, 3), (rows, 2), (rows, 1)]
    sizes = {"image_sizes": torch.tensor([[height, width]] * rows)} if "image_sizes" in names else {}
    yield from _masked(key, names, shape, one)
    if key in ("pixel_values", "pixel_values_images"):
        for lead in several[:3] if sizes else []:
            yield {key: shape.normal(*lead, *one), **sizes}
        yield {key: shape.normal(rows, *one), **sizes}
        yield {key: shape.normal(rows, *one)}
        if "num_patches" in names:
            yield {key: shape.normal(rows, *one), "num_patches": torch.ones(rows, dtype=torch.long)}
    for lead in [(rows, getattr(vision, "num_frames", 2)), *several]:
        yield {key: shape.normal(*lead, *one), **sizes}
    flat = channels * _patch(vision) ** 2
    yield {key: shape.normal(rows * GRID * GRID, flat)}
    yield {key: shape.normal(rows, GRID * GRID, flat)}


def _masked(key: str, names: dict[str, Any], shape: Any, one: tuple[int, int, int]) -> Iterator[dict[str, Any]]:
    """Tiles with a mask that tells real ones from padding, and pictures with a mask of the tokens that see them."""
    rows = shape.rows
    if "image_attention_mask" in names:
        seen = torch.ones(rows, shape.length, 1, dtype=torch.long)
        yield {key: shape.normal(rows, 1, *one), "image_attention_mask": seen}
    if "pixel_attention_mask" in names:
        for tiles in (1, 2):
            pixels = shape.normal(rows, tiles, *one)
            yield {key: pixels, "pixel_attention_mask": torch.ones(rows, tiles, *one[1:], dtype=torch.bool)}
            yield {key: pixels, "pixel_attention_mask": torch.ones(rows, tiles, dtype=torch.bool)}
