"""Checks the values of a config's fields."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from .codecs import Codec
from .codecs.table import CODECS
from .errors import CodecError, UnknownOptionError
from .methods.gact.codec import IntMeasured
from .methods.row_sample.codec import RowSample

CODEC_FIELDS = ("linear", "norm", "mlp", "attention", "checkpoint_input")

# the fields that an override may set for single layers
OVERRIDABLE = (*CODEC_FIELDS, "checkpoint_attention")

# every n-th layer, or all layers but the last n
_SHORTHAND = re.compile(r"(every|but_last):[1-9]\d*")

# how the tokens that get gradients are chosen
TOKEN_CHOICES = ("random", "last", "loss")

# values of tiled_mlp beside numbers of rows
TILES = ("auto", "checkpointed")

# what each codec must have
_METHODS = ("pack", "unpack", "nbytes")

# op -> its variants, for ops that can keep different tensors
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
    """Raise UnknownOptionError if a field of a CompressionConfig has a value that is not allowed."""
    for field in (*CODEC_FIELDS, "other"):
        _check_codec(field, getattr(config, field))
    for _, field, value in config.overrides:
        if field not in OVERRIDABLE:
            raise UnknownOptionError("field of an override", field, OVERRIDABLE)
        if field in CODEC_FIELDS:
            _check_codec(field, value)
        elif value not in VARIANTS[field]:
            raise UnknownOptionError(field, value, VARIANTS[field])
    if config.gradient_norms and config.linear not in sampling():
        raise UnknownOptionError("with gradient_norms, the codec for linear", config.linear, sampling(), refused=True)
    if config.tiled_mlp not in TILES and not (type(config.tiled_mlp) is int and config.tiled_mlp >= 0):
        raise UnknownOptionError("tiled_mlp", config.tiled_mlp, ["a number of rows", *TILES], refused=True)
    if config.refresh_bits and not any(
        isinstance(CODECS[getattr(config, field)], IntMeasured) for field in CODEC_FIELDS
    ):
        measured = [name for name, codec in CODECS.items() if isinstance(codec, IntMeasured)]
        raise UnknownOptionError("with refresh_bits, the codec", config.mlp, measured, refused=True)
    if isinstance(config.checkpoint, str) and not _SHORTHAND.fullmatch(config.checkpoint):
        raise UnknownOptionError(
            "checkpoint", config.checkpoint, ["names of layers", "every:2", "but_last:1"], refused=True
        )
    for field, variants in VARIANTS.items():
        if getattr(config, field) not in variants:
            raise UnknownOptionError(field, getattr(config, field), variants)
    if config.blocks and not config.plans:
        raise UnknownOptionError("with blocks, plans", False, [True], refused=True)
    if config.compile and not config.plans:
        raise UnknownOptionError("with compile, plans", False, [True], refused=True)
    _check_attention(config)
    _check_checkpoints(config)
    _check_tokens(config)


def _check_attention(config: Any) -> None:
    """Reject codecs along tokens for a kept attention output, where heads are at the place of tokens."""
    codecs = [config.attention, *(value for _, field, value in config.overrides if field == "attention")]
    along = [name for name in codecs if CODECS[name].along_tokens]
    if along and config.attention_variant != "recomputed":
        what = f"with the codec {along[0]!r}, attention_variant"
        raise UnknownOptionError(what, config.attention_variant, ["recomputed"], refused=True)


def _check_checkpoints(config: Any) -> None:
    """Kept statistics of the exact q and k need a lossless input: they do not fit q and k of a rounded one."""
    if config.checkpoint_attention == "kept" and not CODECS[config.checkpoint_input].lossless:
        lossless = [name for name, codec in CODECS.items() if codec.lossless]
        what = 'with checkpoint_attention="kept", checkpoint_input'
        raise UnknownOptionError(what, config.checkpoint_input, lossless, refused=True)
    for part, field, _ in config.overrides:
        if field.startswith("checkpoint"):
            # making the config of that layer checks it
            config.at(part)


def _check_tokens(config: Any) -> None:
    for name in ("tokens", "targets"):
        share = getattr(config, name)
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise UnknownOptionError(name, share, ["a share above 0 and up to 1"], refused=True)
    if config.token_choice not in TOKEN_CHOICES and not callable(config.token_choice):
        raise UnknownOptionError("token_choice", config.token_choice, [*TOKEN_CHOICES, "a function"])
    if config.tokens < 1 and config.drop_padding:
        raise UnknownOptionError("with tokens < 1, drop_padding", True, [False], refused=True)
    if config.share_prompts and (config.drop_padding or config.tokens < 1):
        raise UnknownOptionError("with drop_padding or tokens < 1, share_prompts", True, [False], refused=True)


def name_of(codec: Any) -> Any:
    """The name of a codec that was given as an object. A codec that is not in the table is added under its `repr`.

    Raises:
        CodecError: See `check_instance`.
    """
    if isinstance(codec, str) or not callable(getattr(codec, "pack", None)):
        return codec
    check_instance(codec)
    name = registered_name(codec) or repr(codec)
    CODECS.setdefault(name, codec)
    return name


def names_of_blocks(blocks: Any) -> tuple[str, ...]:
    """The names of blocks that were given as names or classes. Raises UnknownOptionError."""
    if not isinstance(blocks, tuple) or not all(isinstance(x, str) or _is_class_of_modules(x) for x in blocks):
        raise UnknownOptionError("blocks", blocks, ["a tuple of names of modules and of classes"], refused=True)
    return tuple(x if isinstance(x, str) else x.__name__ for x in blocks)


def _is_class_of_modules(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def registered_name(codec: Codec) -> str | None:
    """The name of an equal codec in the table. A `repr` under which `name_of` added it is not such a name."""
    return next((name for name, row in CODECS.items() if row == codec and name != repr(codec)), None)


def check_instance(codec: Any) -> None:
    """Raise CodecError if the object is no codec, cannot be a key, or has a `repr` that another process cannot read."""
    missing = [method for method in _METHODS if not callable(getattr(codec, method, None))]
    if isinstance(codec, type):
        raise CodecError(f"{codec!r} is a class, not an instance; pass {codec.__name__}(...)")
    if missing:
        raise CodecError(f"a codec needs the methods {', '.join(_METHODS)}; {codec!r} has no {', '.join(missing)}")
    # a protocol's `isinstance` compares names of methods alone; the base also gives a codec its default properties
    if Codec not in type(codec).__mro__:
        raise CodecError(
            f"{type(codec).__name__} does not inherit from hf_actcompress.extension.Codec; make that its base class"
        )
    try:
        hash(codec)
    except TypeError as error:
        raise CodecError(f"{codec!r} cannot be hashed; make its class a dataclass(frozen=True)") from error
    if " at 0x" in repr(codec):
        raise CodecError(f"the repr {codec!r} contains a memory address; make its class a dataclass(frozen=True)")


def sampling() -> list[str]:
    return [name for name, codec in CODECS.items() if isinstance(codec, RowSample)]


def _check_codec(field: str, codec: str) -> None:
    known = [name for name, row in CODECS.items() if field == "linear" or not row.linear_only]
    if codec not in known:
        raise UnknownOptionError(f"codec for {field}", codec, [*known, "a codec of your own, once it is registered"])
