"""The batch of a pair: the first candidate that the stock model takes, with labels and padding."""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import Tensor

from .inputs import Batch, Shape, arguments, candidates, field, text_config, token_ids
from .overrides import INPUTS
from .step import seed_all

# the messages in which models say how many placeholders they want
_FEATURES = re.compile(r"tokens:? *(\d+).*?features:? *(\d+)", re.S)
_PLACEHOLDERS = (
    "image_token_id", "image_token_index", "media_placeholder_token_id", "image_patch_id", "img_context_token_id",
    "audio_token_id", "audio_token_index", "video_token_id", "video_token_index", "im_patch_token",
    "image_patch_token_id",
)  # fmt: skip


# keys that describe a batch and are not inputs
NOTES = ("placeholder", "text alone")
# tokens that a padded row loses
PADDED = 4
MOST_PLACEHOLDERS = 300


class NoBatch(Exception):
    """No candidate was taken; the message is what the model said to the first ones."""


def find_batch(model: Any, model_type: str, task: str) -> Batch:
    """A batch that the stock model takes, without labels; one that it also takes in train mode if there is any."""
    said: list[str] = []
    fallback: Batch | None = None
    for batch in candidates(model, task):
        found = _fitted(model.eval(), {**batch, **INPUTS.get(model_type, {})}, said)
        if found is None:
            continue
        if _error(model.train(), found) is None:
            return found
        fallback = fallback or found
    model.train()
    if fallback is None:
        raise NoBatch(" | ".join(dict.fromkeys(said))[:400])
    return fallback


def _fitted(model: Any, batch: Batch, said: list[str]) -> Batch | None:
    """The batch with as many placeholders as there are features, or None."""
    waiting = [_with_placeholder(model, batch)]
    for _ in range(5):
        if not waiting:
            return None
        attempt = waiting.pop(0)
        error = _error(model, attempt)
        if error is None:
            return attempt
        said.append(f"{type(error).__name__}: {str(error)[:160]}")
        counts = _FEATURES.search(str(error))
        if counts is not None and "placeholder" in attempt and attempt["placeholder"][1] == 1:
            waiting = _placed(model, attempt, int(counts[2]))
    return None


def _with_placeholder(model: Any, batch: Batch) -> Batch:
    """The batch with one placeholder in each row, where it has pictures or sounds beside its text."""
    tokens = placeholder_tokens(model.config)
    media = any(isinstance(v, Tensor) and v.is_floating_point() for v in batch.values())
    if "input_ids" not in batch or not media or not tokens:
        return batch
    names = [n for n in _PLACEHOLDERS if n in tokens]
    kind = "audio" if any("feature" in k or "audio" in k for k in batch) and "pixel_values" not in batch else "image"
    names = [n for n in names if kind in n] or names[:1]
    if any("videos" in k for k in batch):
        names = [n for n in tokens if "video" in n] or names
    return _put(batch, tokens[names[0]], 1) if names else batch


def placeholder_tokens(config: Any) -> dict[str, int]:
    found = {n: field(config, n) for n in _PLACEHOLDERS}
    return {n: token for n, token in found.items() if type(token) is int}


def _put(batch: Batch, token: int, count: int) -> Batch:
    """`count` placeholders in each row, after the tokens that padding may take; rows are made longer if need be."""
    ids = batch["input_ids"]
    new = torch.cat((ids[:, :PADDED], torch.full((ids.shape[0], count), token), ids[:, PADDED:]), 1)
    out = {**batch, "input_ids": new, "placeholder": (token, count)}
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in out:
            out[name] = (new == token).long()
    return out


def _placed(model: Any, batch: Batch, features: int) -> list[Batch]:
    """The batch with as many placeholders in each row as the message asks for.

    Some messages count features, others the elements of all features.
    """
    token, count = batch["placeholder"]
    each = features // batch["input_ids"].shape[0]
    width = field(text_config(model.config), "hidden_size", default=1)
    plain = original(batch, count)
    return [_put(plain, token, n) for n in dict.fromkeys((each, each // width)) if 0 < n <= MOST_PLACEHOLDERS]


def original(batch: Batch, count: int) -> Batch:
    ids = batch["input_ids"]
    return {**batch, "input_ids": torch.cat((ids[:, :PADDED], ids[:, PADDED + count :]), 1)}


def _error(model: Any, batch: Batch) -> Exception | None:
    """The stock model's exception for the batch; None if it takes the batch."""
    seed_all()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(**{k: v for k, v in batch.items() if k not in NOTES})
    except Exception as error:
        return error
    return None


def with_labels(model: Any, batch: Batch, task: str) -> Batch:
    """The batch with labels for the task, where the forward takes them."""
    names, config = arguments(model), model.config
    shape = Shape()
    rows = next(v.shape[0] for v in batch.values() if isinstance(v, Tensor))
    classes = len(getattr(config, "id2label", None) or {}) or 2
    ids = batch.get("input_ids")
    if task == "span" and "start_positions" in names:
        return {**batch, **{k: torch.tensor([1, 3][:rows]) for k in ("start_positions", "end_positions")}}
    labels: Tensor | None = None
    # a language model that reads sounds has no separate decoder, so its targets are its own tokens
    tokens = task == "tokens" or (task == "target" and "decoder_input_ids" not in names)
    if tokens and isinstance(ids, Tensor):
        # placeholders are no targets
        labels = (
            ids.masked_fill(ids < 8, -100)
            if "placeholder" not in batch
            else ids.masked_fill(ids == batch["placeholder"][0], -100)
        )
    elif task == "target":
        labels = token_ids(config, shape, rows, shape.target)
    elif task == "transcript":
        labels = shape.whole(1, 20, rows, 3)
    elif task in ("class", "choice"):
        labels = shape.whole(0, 2 if task == "choice" else classes, rows)
    elif task == "token_classes" and isinstance(ids, Tensor):
        labels = shape.whole(0, classes, *ids.shape)
    elif task == "pixels" and "pixel_values" in batch:
        labels = shape.whole(0, classes, rows, *batch["pixel_values"].shape[-2:])
    return {**batch, "labels": labels} if labels is not None and "labels" in names else batch


def padded(batch: Batch, side: str, config: Any) -> Batch | None:
    """The second row loses its last (or first) tokens; None where there is nothing to pad."""
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[0] < 2 or ids.shape[1] < 9:
        return None
    mask = torch.ones_like(ids)
    mask[1, slice(ids.shape[1] - PADDED, None) if side == "right" else slice(0, PADDED)] = 0
    out = {**batch, "attention_mask": mask}
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        out["labels"] = labels.masked_fill(mask == 0, -100)
    return out
