"""Batches for a model of which only the config and the names of its forward's arguments are known."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from .pictures import picture_batches
from .rules import FIRST_TEXT_TOKEN

Batch = dict[str, Any]
ROWS, LENGTH, TARGET = 2, 13, 7


@dataclass
class Shape:
    """How big the batch is, and where its random numbers come from."""

    rows: int = ROWS
    length: int = LENGTH
    target: int = TARGET

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self.generator)

    def whole(self, low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), size, generator=self.generator)


def field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config, or a part of it, has with a value."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None and not callable(value):
            return value
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            value = field(part, *names)
            if value is not None:
                return value
    return default


def arguments(model: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(model.forward).parameters)


def text_config(config: Any) -> Any:
    """The part that describes the language model, or the config itself; the decoder's where there are two."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def vocabulary(config: Any) -> int:
    """The text vocabulary's size."""
    text = text_config(config)
    own = next(
        (
            getattr(c, n, None)
            for c in (text, config)
            for n in ("vocab_size", "n_words", "text_vocab_size")
            if type(getattr(c, n, None)) is int
        ),
        None,
    )
    return int(own or field(config, "vocab_size", default=FIRST_TEXT_TOKEN + 8))


def token_ids(config: Any, shape: Shape, rows: int, length: int) -> Tensor:
    vocab = vocabulary(config)
    return shape.whole(FIRST_TEXT_TOKEN if vocab > FIRST_TEXT_TOKEN + 4 else 3, vocab, rows, length)


def candidates(model: Any, task: str) -> Iterator[Batch]:
    """Batches without labels, the most likely ones first. The first one that the stock model takes is used."""
    config, names = model.config, arguments(model)
    for length in (LENGTH, 16, 64):
        shape = Shape(length=length)
        for media in media_batches(config, names, shape):
            yield from _with_options({**_text(config, names, shape, task), **media}, names, bool(media))
    if "input_ids" in names:
        # no layout of pictures or sounds was taken
        yield {**_text(config, names, Shape(), task), "text alone": True}


def _with_options(batch: Batch, names: dict[str, Any], media: bool) -> Iterator[Batch]:
    """The batch as it is, and with what some models insist on or refuse."""
    yield batch
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in names and "input_ids" in batch and media:
            yield {**batch, name: torch.zeros_like(batch["input_ids"])}
    if "decoder_input_ids" in batch:
        yield {k: v for k, v in batch.items() if k != "decoder_input_ids"}


def media_batches(config: Any, names: dict[str, Any], shape: Shape) -> Iterator[Batch]:
    """Pictures or sounds; one empty batch where the model takes text alone."""
    pictures = list(picture_batches(config, names, shape))
    sounds = list(_sounds(config, names, shape))
    yield from pictures
    yield from sounds
    if pictures and sounds:
        yield {**pictures[0], **sounds[0]}
    if not pictures and not sounds:
        yield {}


def _text(config: Any, names: dict[str, Any], shape: Shape, task: str) -> Batch:
    batch: Batch = {}
    rows, length = shape.rows, shape.length
    if "input_ids" in names:
        batch["input_ids"] = token_ids(config, shape, rows, length)
        if task == "choice":
            batch["input_ids"] = token_ids(config, shape, rows * 2, length).view(rows, 2, length)
        eos, separator = field(config, "eos_token_id"), field(config, "sep_token_id")
        if task in ("span", "choice") and type(separator) is int:
            # some models tell the question from the text by three separators
            batch["input_ids"][..., [3, 7, 9]] = separator
        if task == "class" and type(eos) is int:
            # some sentence classifiers read the last end-of-sentence token
            batch["input_ids"][..., -1] = eos
    if "decoder_input_ids" in names:
        batch["decoder_input_ids"] = token_ids(config, shape, rows, shape.target)
    for name, make in _EXTRA.items():
        if name in names:
            batch[name] = make(config, shape)
    return batch


# fields that say how many numbers a frame of sound has
_MEL = (
    "input_feat_per_channel",
    "num_mel_bins",
    "n_mels",
    "n_mel_bins",
    "input_feat_size",
    "feature_size",
    "feature_projection_input_dim",
    "input_dim",
)


def _sounds(config: Any, names: dict[str, Any], shape: Shape) -> Iterator[Batch]:
    rows = shape.rows
    mel = field(config, *_MEL, default=16)
    frames = 2 * field(config, "max_source_positions", default=16)
    if "input_values" in names and not {"pixel_values", "bbox"} & names.keys():
        if hasattr(config, "frequency_stride"):
            yield {"input_values": shape.normal(rows, config.max_length, mel)}
        for samples in (640, 1920, 9600):
            yield {"input_values": shape.normal(rows, samples)}
            yield {"input_values": shape.normal(rows, 1, samples)}
    for name in ("input_features", "audio_values", "input_audio_embeds", "audio_features"):
        if name not in names:
            continue
        for length in (frames, 40, 64, 128):
            mel = mel * (field(config, "num_stacked_frames", default=1) if length == frames else 1)
            for size in ((rows, mel, length), (rows, length, mel)):
                sound: Batch = {name: shape.normal(*size)}
                for mask in ("input_features_mask", "feature_attention_mask"):
                    if mask in names:
                        yield {**sound, mask: torch.ones(rows, length, dtype=torch.long)}
                        yield {**sound, mask: torch.ones(rows, length, dtype=torch.bool)}
                yield sound
            yield {name: shape.normal(rows, 1, length, mel)}


def _boxes(config: Any, shape: Shape) -> Tensor:
    """Boxes x0 y0 x1 y1 with x0 <= x1 and y0 <= y1."""
    a = shape.whole(0, 100, shape.rows, shape.length, 2)
    return torch.cat((a, a + shape.whole(1, 100, shape.rows, shape.length, 2)), -1)


def _flattened(config: Any, shape: Shape) -> Tensor:
    """Rows of patches, each with its row and its column before its pixels."""
    places = torch.cartesian_prod(torch.arange(1, 5), torch.arange(1, 5)).float().expand(shape.rows, -1, -1)
    pixels = shape.normal(shape.rows, 16, 3 * field(config, "patch_size", default=8) ** 2)
    return torch.cat((places, pixels), -1)


def _past(config: Any) -> int:
    """How many past values a model of time series reads."""
    return int(field(config, "context_length", default=16) + max(field(config, "lags_sequence", default=[0])))


def _series(config: Any, shape: Shape, length: int) -> Tensor:
    """Values over time: one channel without a dimension of its own, or some channels."""
    if hasattr(config, "lags_sequence"):
        return shape.normal(shape.rows, length)
    return shape.normal(shape.rows, length, field(config, "num_input_channels", default=1))


# arguments that a model needs beside its tokens, pictures and sounds
_EXTRA: dict[str, Callable[[Any, Shape], Tensor]] = {
    "bbox": _boxes,
    "past_values": lambda c, s: _series(c, s, _past(c)),
    "past_time_features": lambda c, s: s.normal(s.rows, _past(c), c.num_time_features),
    "past_observed_mask": lambda c, s: torch.ones_like(_series(c, s, _past(c))),
    "future_values": lambda c, s: _series(c, s, field(c, "prediction_length", default=4)),
    "future_time_features": lambda c, s: s.normal(s.rows, c.prediction_length, c.num_time_features),
    "states": lambda c, s: s.normal(s.rows, s.length, c.state_dim),
    "actions": lambda c, s: s.normal(s.rows, s.length, c.act_dim),
    "rewards": lambda c, s: s.normal(s.rows, s.length, 1),
    "returns_to_go": lambda c, s: s.normal(s.rows, s.length, 1),
    "timesteps": lambda c, s: torch.arange(s.length).expand(s.rows, -1),
    "visual_feats": lambda c, s: s.normal(s.rows, 5, c.visual_feat_dim),
    "visual_pos": lambda c, s: s.normal(s.rows, 5, c.visual_pos_dim),
    "speech_labels": lambda c, s: s.normal(s.rows, 8, c.num_mel_bins),
    "flattened_patches": _flattened,
    "high_res_pixel_values": lambda c, s: s.normal(s.rows, 3, 32, 32),
    "qformer_input_ids": lambda c, s: token_ids(c.qformer_config, s, s.rows, 6),
    "image_embeds_position_mask": lambda c, s: (
        torch.arange(s.length).lt(field(c, "latent_query_num")).long().expand(s.rows, -1)
    ),
    "query_embeds": lambda c, s: s.normal(s.rows, 5, c.hidden_size),
    "entity_ids": lambda c, s: s.whole(1, c.entity_vocab_size, s.rows, 2),
    "entity_position_ids": lambda c, s: torch.tensor([[[1, 2, -1], [3, 4, 5]]]).expand(s.rows, -1, -1),
}
