"""What the fields of a config may be."""

from __future__ import annotations

import re
from typing import Any

from .codecs import CODECS, IntMeasured, RowSample
from .errors import UnknownOptionError

CODEC_ROLES = ("linear", "norm", "mlp", "attention", "checkpoint_input")

# every so many layers, or all but so many at the end
_SHORTHAND = re.compile(r"(every|but_last):[1-9]\d*")

# which tokens get gradients
TOKEN_CHOICES = ("random", "last", "loss")

# which tensors an op keeps, where there is a choice
VARIANTS: dict[str, tuple[str, ...]] = {
    "activation_variant": (
        "input", "output", "derivative",
        "steps1", "steps2", "steps3", "steps4",
        "values2", "values3", "values4", "values8",
        "relus2",
    ),
    "norm_variant": ("input", "output"),
    "attention_variant": ("statistics", "recomputed", "tempo"),
    "checkpoint_attention": ("recomputed", "kept"),
}  # fmt: skip


def check(config: Any) -> None:
    """Raise UnknownOptionError for a field of a CompressionConfig that is not what it may be."""
    for role in (*CODEC_ROLES, "other"):
        _check_codec(role, getattr(config, role))
    for _, role, codec in config.overrides:
        if role not in CODEC_ROLES:
            raise UnknownOptionError("role of an override", role, CODEC_ROLES)
        _check_codec(role, codec)
    if config.gradient_norms and config.linear not in sampling():
        raise UnknownOptionError("codec for linear under gradient_norms", config.linear, sampling())
    if config.tiled_mlp != "auto" and not (type(config.tiled_mlp) is int and config.tiled_mlp >= 0):
        raise UnknownOptionError("tiled_mlp", config.tiled_mlp, ["a number of rows", "auto"])
    if config.refresh_bits and not any(isinstance(CODECS[getattr(config, role)], IntMeasured) for role in CODEC_ROLES):
        measured = [name for name, codec in CODECS.items() if isinstance(codec, IntMeasured)]
        raise UnknownOptionError("codec under refresh_bits", config.mlp, measured)
    if isinstance(config.checkpoint, str) and not _SHORTHAND.fullmatch(config.checkpoint):
        raise UnknownOptionError("checkpoint", config.checkpoint, ["names of layers", "every:2", "but_last:1"])
    for field, variants in VARIANTS.items():
        if getattr(config, field) not in variants:
            raise UnknownOptionError(field, getattr(config, field), variants)
    inputs = [config.checkpoint_input, *(codec for _, role, codec in config.overrides if role == "checkpoint_input")]
    lossy = [name for name in inputs if not CODECS[name].lossless]
    if config.checkpoint_attention == "kept" and lossy:
        lossless = [name for name, codec in CODECS.items() if codec.lossless]
        raise UnknownOptionError('checkpoint_input with checkpoint_attention="kept"', lossy[0], lossless)
    _check_tokens(config)


def _check_tokens(config: Any) -> None:
    for name in ("tokens", "targets"):
        share = getattr(config, name)
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise UnknownOptionError(name, share, ["a share above 0 and up to 1"])
    if config.token_choice not in TOKEN_CHOICES and not callable(config.token_choice):
        raise UnknownOptionError("token_choice", config.token_choice, [*TOKEN_CHOICES, "a function"])
    if config.tokens < 1 and config.drop_padding:
        raise UnknownOptionError("drop_padding with tokens < 1", True, [False])


def name_of(codec: Any) -> Any:
    """A name for a codec that was given itself. One that is not in the table comes in under its `repr`."""
    if isinstance(codec, str) or not callable(getattr(codec, "pack", None)):
        return codec
    name = next((name for name, row in CODECS.items() if row == codec), repr(codec))
    CODECS.setdefault(name, codec)
    return name


def sampling() -> list[str]:
    return [name for name, codec in CODECS.items() if isinstance(codec, RowSample)]


def _check_codec(role: str, codec: str) -> None:
    known = [name for name, row in CODECS.items() if role == "linear" or not row.linear_only]
    if codec not in known:
        raise UnknownOptionError(f"codec for {role}", codec, known)
