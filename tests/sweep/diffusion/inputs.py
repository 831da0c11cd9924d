"""The batch of a class: an input for each name that its forward takes and that a row knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from .classes import parameters
from .sizes import CHANNELS, TEXT, WIDTH

ROWS = 2
WORDS = 16
SIDE = 16
FRAMES = 2
Batch = dict[str, Any]
# what a maker is told: the arguments that the class was made with
Config = Mapping[str, Any]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ones(*shape: int) -> Tensor:
    """A mask that takes all in."""
    return torch.ones(*shape, dtype=torch.long)


def places(count: int, axes: int) -> Tensor:
    """Where the tokens of a square picture are, [count, axes]; the first axis is zero."""
    side = int(count**0.5)
    out = torch.zeros(count, axes)
    out[: side * side, -2:] = torch.cartesian_prod(torch.arange(side), torch.arange(side)).float()
    return out


def latents(kind: str, channels: int) -> Tensor:
    """What a model denoises: [rows, tokens, channels], or the channels in front of one to three sides."""
    if kind == "tokens":
        return noise(ROWS, SIDE * SIDE, channels)
    sides = {"sound": (8 * SIDE,), "picture": (SIDE, SIDE), "video": (FRAMES, SIDE, SIDE)}[kind]
    return noise(ROWS, channels, *sides)


def kind_of(name: str, arguments: Mapping[str, Any]) -> str:
    """Whether a class works on tokens, sounds, pictures or videos."""
    if any(name in arguments for name in ("img_ids", "img_shapes")):
        return "tokens"
    return next((kind for part, kind in (("1D", "sound"), ("3D", "video")) if part in name), "picture")


def _caption(config: Config) -> Tensor:
    widths = ("text", "caption", "cap_feat", "joint", "llm", "context_in", "encoder_hid", "condition_dim", "cond_token")
    given = any(value is not None and name.startswith(widths) for name, value in config.items())
    width = TEXT if given else config.get("cross_attention_dim") or WIDTH
    return noise(ROWS, WORDS, width, seed=1)


def _axes(config: Config) -> int:
    return len(config.get("axes_dims_rope") or (0, 0, 0))


NAMES: dict[str, Callable[[Config], Any]] = {
    "timestep": lambda c: torch.tensor([0.3, 0.7]),
    "timesteps": lambda c: torch.tensor([0.3, 0.7]),
    "timestep_r": lambda c: torch.tensor([0.1, 0.2]),
    "r_timestep": lambda c: torch.tensor([0.1, 0.2]),
    "encoder_hidden_states": _caption,
    "encoder_attention_mask": lambda c: ones(ROWS, WORDS),
    "encoder_hidden_states_mask": lambda c: ones(ROWS, WORDS),
    "pooled_projections": lambda c: noise(ROWS, TEXT, seed=2),
    "img_ids": lambda c: places(SIDE * SIDE, _axes(c)),
    "txt_ids": lambda c: torch.zeros(WORDS, _axes(c)),
    "img_shapes": lambda c: [[(1, SIDE, SIDE)]] * ROWS,
    "guidance": lambda c: torch.tensor([3.5, 3.5]),
    "original_size": lambda c: torch.tensor([[SIDE * 8, SIDE * 8]] * ROWS),
    "target_size": lambda c: torch.tensor([[SIDE * 8, SIDE * 8]] * ROWS),
    "crop_coords": lambda c: torch.tensor([[0, 0]] * ROWS),
    "class_labels": lambda c: torch.tensor([1, 3]),
}
# inputs that have a default, and are left out where no argument of the class says that there are any
OPTIONAL = {"pooled_projections": "pooled_projection_dim", "guidance": "guidance_embeds",
            "class_labels": "num_embeds_ada_norm", "timestep_r": "use_meanflow"}  # fmt: skip


def batch(cls: Any, config: Config, changed: Batch) -> Batch:
    """The inputs that the class is given: those of the table, and what is asked for in place of them or besides."""
    taken = parameters(cls.forward)
    out: Batch = {}
    for name, default in taken.items():
        needed = default is Parameter.empty or bool(config.get(OPTIONAL.get(name, ""), name not in OPTIONAL))
        if name in NAMES and needed:
            out[name] = NAMES[name](config)
    first = next(iter(taken))
    kind = changed.get("kind") or kind_of(cls.__name__, taken)
    if first in ("hidden_states", "sample"):
        out[first] = latents(kind, config.get("in_channels") or CHANNELS)
    out |= changed
    return {name: value for name, value in out.items() if value is not None and name in taken}
